"""Servers with the same model behind HTTP: the least busy is asked, a gone one rests, what may pass is retried."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from mrlm_pl.errors import ConfigurationError, EngineError, RemoteError
from mrlm_pl.settings import at_least, positive

logger = logging.getLogger(__name__)

FIRST_REST, LONGEST_REST = 0.5, 30.0
"""Seconds for which a server that failed is passed over; doubled each time that it fails again."""

SHOWN_CHARACTERS = 500
"""Of a server's message that an error shows."""

_PASSING = (408, 429, 500, 502, 503, 504)
_ABSENT = (502, 503, 504)  # what a proxy says while there is no server, which may have other weights afterwards
_jitter = random.Random()  # of the length of pauses alone, so that many requests do not come back at the same moment


class PassingError(Exception):
    """A problem that another attempt, perhaps with another server, may not have."""


class RefusalError(EngineError):
    """A server understood the request and does not take it; ``status`` is its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Terms:
    """Deadlines, retries and concurrency of requests.

    Args:
        timeout_seconds: that one HTTP request may take.
        patience_seconds: after which a request that nobody has answered fails, whatever was tried.
        retries: how many times a request is sent again.
        concurrency: requests under way at the same time, over all servers.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    timeout_seconds: float = 300.0
    patience_seconds: float = 900.0
    retries: int = 8
    concurrency: int = 256

    def __post_init__(self) -> None:
        positive("", timeout_seconds=self.timeout_seconds, patience_seconds=self.patience_seconds)
        at_least(0, "", retries=self.retries)
        at_least(1, "", concurrency=self.concurrency)


@dataclass
class HttpStats:
    """Counters of requests that samples were made with.

    Attributes:
        requests: that were answered.
        retries: times that one was sent again.
        tokens: that were sampled.
        re_encoded: replies whose tokens are not known to be the sampled ones; see the dialect ``transformers``.
    """

    requests: int = 0
    retries: int = 0
    tokens: int = 0
    re_encoded: int = 0


@dataclass(eq=False)
class Replica:
    """One server, as its client knows it.

    Attributes:
        url: without a slash at the end.
        checked: whether it was seen to be what it should be, since it was last gone.
        ready: whether it has the current weights as well.
        busy: requests under way.
        doubtful: whether it failed when it was last asked; it then gets one request at a time.
        rests_until: loop time before which it is not asked.
    """

    url: str
    checked: bool = False
    ready: bool = False
    busy: int = 0
    doubtful: bool = False
    rests_until: float = 0.0
    rest: float = FIRST_REST
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note_failure(self, now: float, gone: bool) -> None:
        """Pass it over for a while; ``gone``: it may be another process when it comes back."""
        if gone:
            self.ready = self.checked = False
        if now >= self.rests_until:  # else it rests already: many requests may have failed at once
            self.doubtful, self.rests_until = True, now + self.rest
            self.rest = min(LONGEST_REST, 2 * self.rest)

    def note_answer(self) -> None:
        """It works."""
        if self.doubtful:
            logger.warning("%s answers again", self.url)
        self.doubtful, self.rest = False, FIRST_REST


class Replicas:
    """Servers that can stand in for each other; to be used on one event loop.

    Args:
        urls: ``http://HOST:PORT`` or ``https://...``; a path at the end, such as of a proxy, is kept.
        api_key_env: name of the environment variable with the key; None sends none.
        terms: deadlines and bounds.
        stats: counters that are kept up to date.

    Raises:
        ConfigurationError: a URL is not one, or the variable is not set.
    """

    def __init__(self, urls: Sequence[str], api_key_env: str | None, terms: Terms, stats: HttpStats) -> None:
        self.all = [Replica(_checked_url(url)) for url in dict.fromkeys(urls)]
        if not self.all:
            raise ConfigurationError("url names no server; give http://HOST:PORT")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigurationError(
                f"api_key_env is {api_key_env!r}, and that environment variable is not set; `export {api_key_env}=...`"
            )
        self.api_key_env, self.terms, self.stats = api_key_env, terms, stats
        self.prepare: Callable[[Replica], Awaitable[None]] | None = None
        self._session: aiohttp.ClientSession | None = None

    def keep(self, urls: Sequence[str]) -> None:
        """Forget all servers but these."""
        self.all = [replica for replica in self.all if replica.url in urls]

    @property
    def targets(self) -> str:
        """The URLs, for messages."""
        return ", ".join(replica.url for replica in self.all)

    async def ask(self, path: str, body: dict[str, Any], whom: str, read: Callable[[Any, Replica], Any]) -> Any:
        """Send a request to the servers in turn; return the first answer, parsed by ``read``.

        Args:
            path: of the request, a POST.
            body: is sent as JSON.
            whom: for messages: the policy that the request is for.
            read: may raise :class:`PassingError`.

        Raises:
            EngineError: a server refuses the request.
            RemoteError: no server answered within the bounds.
        """
        loop = asyncio.get_running_loop()
        deadline, tries, problem = loop.time() + self.terms.patience_seconds, 0, ""
        while True:
            replica = self._least_busy(loop.time())
            pause = 0.0 if replica is not None else self._pause(loop.time())
            if tries > self.terms.retries or loop.time() + pause >= deadline:
                raise RemoteError(
                    f"{whom}: none of {self.targets} gave a sample in {tries} tries "
                    f"(retries: {self.terms.retries}, patience_seconds: {self.terms.patience_seconds:g}); start the "
                    f"server again or check the URL; the last problem: {problem or 'all servers rest'}"
                )
            if replica is None:
                await asyncio.sleep(pause)
                continue
            tries += 1
            self.stats.retries += tries > 1
            try:
                answer = read(await self._asked(replica, path, body, whom, deadline), replica)
            except PassingError as error:
                problem = str(error)
                logger.info("%s: %s", whom, problem)
                replica.note_failure(loop.time(), gone=False)
                continue
            self.stats.requests += 1
            return answer

    async def _asked(self, replica: Replica, path: str, body: dict[str, Any], whom: str, deadline: float) -> Any:
        loop = asyncio.get_running_loop()
        replica.busy += 1
        try:
            if not replica.ready:
                await self.make_ready(replica)
            seconds = min(self.terms.timeout_seconds, max(deadline - loop.time(), 0.05))
            return await self.once(replica, path, body, whom, seconds)
        finally:
            replica.busy -= 1

    async def make_ready(self, replica: Replica) -> None:
        """Prepare a server that was not yet asked, or was gone."""
        async with replica.preparing:
            if not replica.ready:
                if self.prepare is not None:
                    await self.prepare(replica)
                replica.ready = True

    async def once(
        self, replica: Replica, path: str, body: dict[str, Any] | None, whom: str, seconds: float | None = None
    ) -> Any:
        """Return the JSON of one answer; without a body, of a GET.

        Raises:
            PassingError: the server cannot be reached, is late, or has too much to do.
            RefusalError: it does not take the request.
        """
        seconds = self.terms.timeout_seconds if seconds is None else seconds
        url, now = f"{replica.url}{path}", asyncio.get_running_loop().time
        verb = "GET" if body is None else "POST"
        try:
            async with self._opened().request(
                verb, url, json=body, headers=self._headers(), timeout=aiohttp.ClientTimeout(total=seconds)
            ) as reply:
                status, text = reply.status, (await reply.read()).decode(errors="replace")
        except (asyncio.TimeoutError, aiohttp.ClientError, OSError) as error:
            replica.note_failure(now(), gone=True)
            late = isinstance(error, asyncio.TimeoutError)
            what = f"no answer within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
            raise PassingError(f"{verb} {url}: {what}") from error
        if status in _PASSING:
            replica.note_failure(now(), gone=False)
            replica.ready = replica.ready and status not in _ABSENT
            raise PassingError(f"{verb} {url}: status {status}: {_message(text)}")
        if status >= 400:
            raise RefusalError(status, f"{whom}: {verb} {url}: status {status}: {_message(text)}{self._remedy(status)}")
        replica.note_answer()
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError as error:
            raise RemoteError(f"{whom}: {verb} {url} answered what is not JSON: {text[:100]!r}") from error

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _least_busy(self, now: float) -> Replica | None:
        free = [item for item in self.all if item.rests_until <= now and not (item.doubtful and item.busy)]
        # One that has rested gets a request at once, or it would never be found to be back.
        return min(free, key=lambda item: (not item.doubtful, item.busy), default=None)

    def _pause(self, now: float) -> float:
        """Return seconds until a server may be asked again."""
        waking = min((item.rests_until for item in self.all if item.rests_until > now), default=now)
        return max(waking - now, 0.05) * _jitter.uniform(1.0, 1.2)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.terms.concurrency)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def _headers(self) -> dict[str, str]:
        return {} if self.api_key_env is None else {"Authorization": f"Bearer {os.environ[self.api_key_env]}"}

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            return "; set `api_key_env` to the name of the environment variable with the server's key"
        if status in (404, 405):
            return "; check the URL (without /v1) and `dialect`, which says what server it is"
        return ""


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"url {url!r} is not of the form http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password or parts.query:
        raise ConfigurationError(f"the url of {parts.hostname} holds a key; name its variable in `api_key_env` instead")
    return url.rstrip("/").removesuffix("/v1")


def _message(text: str) -> str:
    """Return the message in a server's error reply."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text[:SHOWN_CHARACTERS]
    while isinstance(found, dict):
        inner = next((found[key] for key in ("error", "message", "detail") if key in found), None)
        if inner is None:
            break
        found = inner
    return str(found)[:SHOWN_CHARACTERS]


def share_of(urls: Sequence[str], place: int, places: int) -> list[str]:
    """The servers of a worker: as many of ``urls`` as of every other, or the only one, on the worker's own machine.

    Args:
        urls: of all workers' servers.
        place: the worker's number, from 0.
        places: how many workers there are.

    Raises:
        ConfigurationError: they cannot be shared out.

    >>> share_of(["http://a:1", "http://b:1", "http://a:2", "http://b:2"], 1, 2)
    ['http://b:1', 'http://b:2']
    >>> share_of(["http://127.0.0.1:8000"], 1, 2)
    ['http://127.0.0.1:8000']
    """
    if len(urls) % places == 0:
        return list(urls[place::places])
    if len(urls) == 1 and is_of_own_machine(urls[0]):
        return list(urls)
    remedy = f"give {places} urls or a multiple, or one http://127.0.0.1:PORT: that of each worker's own machine"
    if len(urls) == 1:
        raise ConfigurationError(f"{places} workers would hand their weights to one server, {urls[0]}; {remedy}")
    raise ConfigurationError(f"{len(urls)} servers cannot be shared out among {places} workers; {remedy}")


def is_of_own_machine(url: str) -> bool:
    """Return whether every machine calls a server of its own by this URL.

    >>> [is_of_own_machine(f"http://{host}:1") for host in ("localhost", "127.0.1.1", "[::1]", "10.0.0.1", "a")]
    [True, True, True, False, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def claim_of(url: str) -> str:
    """Return the claim of a worker of this machine on a server: equal for the same server."""
    if not is_of_own_machine(url):
        return f"the server {url}"
    return f"the server at port {urlsplit(url).port} of {socket.gethostname()}"
