"""Servers with the same model behind HTTP: the least busy one is asked, others are tried after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from mrlm_pl.errors import ConfigurationError, EngineError, MRLMError, RemoteError
from mrlm_pl.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings

logger = logging.getLogger(__name__)

FIRST_REST, LONGEST_REST = 0.5, 30.0
"""Seconds for which a failed server gets no requests; doubled by each further failure."""

SHOWN_CHARACTERS = 500
"""Length of a server's message in errors."""

IDLE_SECONDS = 5.0
"""Seconds without a request after which a server may be another process, as connections are closed by then."""

UNUSABLE_REPLIES = 2
"""Replies to a request that may be unusable, such as one that is cut off, before the fault is an error."""

_PASSING = (408, 429, 500, 502, 503, 504)
_ABSENT = (502, 503, 504)  # a proxy's answers without a server; the next one may have other weights
_REMEDIES = {
    (401, 403): "; set `api_key_env` to the name of the environment variable with the server's key",
    (404, 405): "; check the URL (without /v1) and `dialect`, which says what server it is",
}
_MESSAGE_KEYS = ("error", "message", "detail")
_jitter = random.Random()  # for pauses alone, so that requests do not come back at the same moment


class PassingError(Exception):
    """A failure worth retrying, possibly on another server."""


class UnreachableError(PassingError):
    """The server gave no answer: it is gone or late, or a proxy cannot reach it."""


class RefusalError(EngineError):
    """A server understood a request and rejects it."""


@dataclass(frozen=True)
class Terms(Settings):
    """Deadlines, retries and concurrency of requests.

    Args:
        timeout_seconds: deadline of one HTTP request.
        patience_seconds: deadline of a request over all its tries.
        retries: maximum repetitions of a request; waiting for a server that is gone does not count.
        concurrency: maximum concurrent requests, over all servers.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    timeout_seconds: PositiveFloat = 300.0
    patience_seconds: PositiveFloat = 900.0
    retries: NonNegativeInt = 8
    concurrency: PositiveInt = 256


@dataclass(eq=False)
class Replica:
    """The client's view of one server.

    Attributes:
        url: URL of the server, without a slash at the end.
        checked: whether its abilities were checked since it was last unreachable.
        ready: whether it has also received the current weights.
        holds: folders of the weights that it received last.
        answered: loop time of its last answer.
        busy: running requests.
        failures: number of failures since its last answer; after one it gets one request at a time.
        rests_until: loop time before which it gets no requests.
    """

    url: str
    checked: bool = False
    ready: bool = False
    holds: list[str] = field(default_factory=list)
    answered: float = 0.0
    busy: int = 0
    failures: int = 0
    rests_until: float = 0.0
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def failed(self, now: float, problem: PassingError, seconds: float = 0.0) -> PassingError:
        """Send it no requests for a while, at least ``seconds``; warn of the first failure in a row; return it."""
        if isinstance(problem, UnreachableError):  # it may be another process when it is back
            self.ready = self.checked = False
        if now >= self.rests_until:  # else another request failed at the same time
            if not self.failures:
                logger.warning("%s; trying again: start the server if it is not running, or check the URL", problem)
            rest = min(LONGEST_REST, FIRST_REST * 2 ** min(self.failures, 10))
            self.failures, self.rests_until = self.failures + 1, now + max(rest, seconds)
        return problem

    def note_answer(self, now: float) -> None:
        """Trust the server again."""
        self.answered = now
        if self.failures:
            logger.warning("%s answers again", self.url)
        self.failures = 0


class Replicas:
    """Interchangeable servers; to be used on one event loop.

    Args:
        urls: ``http://HOST:PORT`` or ``https://...``, with the path of a proxy if there is one.
        api_key_env: name of the environment variable with the key; None sends none.
        terms: deadlines and bounds.
        prepare: checks a new server and gives it the current weights.

    Raises:
        ConfigurationError: a URL is invalid, or the variable is not set.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api_key_env: str | None,
        terms: Terms,
        prepare: Callable[[Replica], Awaitable[None]],
    ) -> None:
        self.all = [Replica(_check_url(url)) for url in dict.fromkeys(urls)]
        if not self.all:
            raise ConfigurationError("url names no server; give http://HOST:PORT")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigurationError(
                f"api_key_env is {api_key_env!r}, and that environment variable is not set; `export {api_key_env}=...`"
            )
        self._key_env, self.terms, self._prepare = api_key_env, terms, prepare
        self._session: aiohttp.ClientSession | None = None

    @property
    def targets(self) -> str:
        """The URLs, for messages."""
        return ", ".join(replica.url for replica in self.all)

    async def ask(self, path: str, body: dict[str, Any], whom: str, read: Callable[[Any, Replica], Any]) -> Any:
        """Send a request to the servers in turn; return the first answer, parsed by ``read``.

        Args:
            path: path of the POST.
            body: body of the POST, as JSON.
            whom: names the policy in errors.
            read: may raise :class:`PassingError`, or :class:`RemoteError` for a reply that cannot be used.

        Raises:
            EngineError: a server rejects the request.
            RemoteError: no server answered within the bounds, or several replies cannot be used.
        """
        loop = asyncio.get_running_loop()
        deadline, tries, problem = loop.time() + self.terms.patience_seconds, 0, ""
        unusable = 0
        while True:
            now = loop.time()
            free = [one for one in self.all if one.rests_until <= now and not (one.failures and one.busy)]
            # A server that failed gets the next request, or its return would never be noticed.
            replica = min(free, key=lambda one: (not one.failures, one.busy), default=None)
            waking = min((one.rests_until for one in self.all if one.rests_until > now), default=now)
            pause = 0.0 if replica is not None else max(waking - now, 0.05) * _jitter.uniform(1.0, 1.2)
            if tries > self.terms.retries or loop.time() + pause >= deadline:
                raise RemoteError(
                    f"{whom}: none of {self.targets} gave a sample in {tries} tries "
                    f"(retries: {self.terms.retries}, patience_seconds: {self.terms.patience_seconds:g}); start the "
                    f"server again, check the URL or raise the bound; the last problem: {problem or 'all servers rest'}"
                )
            if replica is None:
                await asyncio.sleep(pause)
                continue
            if not replica.busy and now - replica.answered > IDLE_SECONDS:
                replica.ready = False
            replica.busy += 1
            try:
                if not replica.ready:
                    await self.make_ready(replica)
                tries += 1
                seconds = min(self.terms.timeout_seconds, max(deadline - loop.time(), 0.05))
                with naming(replica.url):
                    answer = read(await self.once(replica, path, body, whom, seconds), replica)
            except PassingError as error:
                problem = str(replica.failed(loop.time(), error))
            except RemoteError as error:  # a reply that is cut off; the next may be whole
                unusable += 1
                if unusable > UNUSABLE_REPLIES or tries > self.terms.retries:
                    raise
                problem = str(error)
                logger.warning("%s: %s; trying again", whom, problem)
            else:
                replica.note_answer(loop.time())
                return answer
            finally:
                replica.busy -= 1

    async def make_ready(self, replica: Replica) -> None:
        """Prepare a server before its first request, and after it was unreachable."""
        async with replica.preparing:
            if not replica.ready:
                with naming(replica.url):
                    await self._prepare(replica)
                replica.ready = True
                replica.note_answer(asyncio.get_running_loop().time())

    async def once(
        self, replica: Replica, path: str, body: dict[str, Any] | None, whom: str, seconds: float | None = None
    ) -> Any:
        """Return the JSON of one answer to a POST, or, without a body, to a GET.

        Raises:
            UnreachableError: the server gave no answer in time.
            PassingError: the server is overloaded.
            RefusalError: the server rejects the request, or has no TLS or an unknown certificate.
        """
        seconds = self.terms.timeout_seconds if seconds is None else seconds
        url, now = f"{replica.url}{path}", asyncio.get_running_loop().time
        verb = "GET" if body is None else "POST"
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.terms.concurrency)
            headers = {"Authorization": f"Bearer {os.environ[self._key_env]}"} if self._key_env else {}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        try:
            async with self._session.request(
                verb, url, json=body, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as reply:
                status, text = reply.status, (await reply.read()).decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            late = isinstance(error, TimeoutError)
            what = f"no answer within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
            if isinstance(error, aiohttp.ClientSSLError) and "EOF" not in what:  # with EOF: it hung up, as it goes down
                raise RefusalError(f"{whom}: {verb} {url}: {what}; check http or https, and the certificate") from error
            raise replica.failed(now(), UnreachableError(f"{verb} {url}: {what}")) from error
        if status in _PASSING:
            rest = reply.headers.get("Retry-After", "")  # seconds, or a date, which is left out
            kind = UnreachableError if status in _ABSENT else PassingError
            asked = f" (Retry-After: {rest})" if rest else ""
            problem = kind(f"{verb} {url}: status {status}{asked}: {_message(text)}")
            raise replica.failed(now(), problem, float(rest) if rest.isdecimal() else 0.0)
        if status >= 400:
            remedy = next((text for statuses, text in _REMEDIES.items() if status in statuses), "")
            raise RefusalError(f"{whom}: {verb} {url}: status {status}: {_message(text)}{remedy}")
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:  # also numbers of too many digits
            fault = f"{whom}: {verb} {url} answered with invalid JSON: {text[:100]!r}; check the URL and its proxies"
            raise RemoteError(fault) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


@contextlib.contextmanager
def naming(url: str) -> Iterator[None]:
    """Let the errors of a server name its URL."""
    try:
        yield
    except (MRLMError, PassingError) as error:
        if url in str(error):
            raise
        raise type(error)(f"{url}: {error}") from error


def _check_url(url: str) -> str:
    split_url, valid = urlsplit(url), False
    with contextlib.suppress(ValueError):  # of a port that is not a number, or too large
        valid = split_url.scheme in ("http", "https") and bool(split_url.hostname) and split_url.port != 0
    if not valid:
        raise ConfigurationError(f"url {url!r} is not of the form http://HOST:PORT or https://HOST:PORT")
    if split_url.username or split_url.password or split_url.query:
        raise ConfigurationError(
            f"the url of {split_url.hostname} holds a key; name its variable in `api_key_env` instead"
        )
    return url.rstrip("/").removesuffix("/v1")


def _message(text: str) -> str:
    """Return the message in a server's error reply."""
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(text)
        while isinstance(reply, dict) and (message_keys := reply.keys() & set(_MESSAGE_KEYS)):
            reply = reply[min(message_keys, key=_MESSAGE_KEYS.index)]
        text = str(reply)
    return text[:SHOWN_CHARACTERS]
