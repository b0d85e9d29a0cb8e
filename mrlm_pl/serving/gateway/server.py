"""The endpoint of one process: it finds the episode and the agent of each call by its key."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment.tasks import Shared
from mrlm_pl.environment.tools import MAX_LEVELS, nested_too_deeply
from mrlm_pl.errors import ProgramError, RemoteError
from mrlm_pl.serving.gateway.messages import messages_body, messages_error, messages_events, read_messages
from mrlm_pl.serving.gateway.programs import Endpoint
from mrlm_pl.serving.gateway.protocol import (
    Call,
    ProtocolError,
    chat_body,
    chat_events,
    read_call,
    responses_body,
    responses_events,
)
from mrlm_pl.serving.gateway.session import LEFT, TOO_LONG, Session, ended
from mrlm_pl.serving.transport.http_log import leave_out_malformed_requests
from mrlm_pl.serving.transport.security import carries_token, is_foreign, read_token

T = TypeVar("T")
KEY = "ep-"
BODY_MB = 16
REMEMBERED = 10_000
"""Maximum number of ended episodes whose keys are distinguished from wrong ones."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_FORMS: dict[str, tuple[Callable[..., Call], Callable[..., dict[str, Any]], Callable[..., Iterator[str]]]] = {
    "/v1/chat/completions": (partial(read_call, "chat"), chat_body, chat_events),
    "/v1/responses": (partial(read_call, "responses"), responses_body, responses_events),
    "/v1/messages": (read_messages, messages_body, messages_events),
}
"""Functions by address that read, answer and stream its calls."""

logger = logging.getLogger(__name__)


class Gateway(Shared):
    """An endpoint of OpenAI's and Anthropic's protocols for a process's episodes; copies of an environment share it.

    It listens from the first episode on, until :meth:`rest` finds none.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        programs: whether the programs are started here; programs started elsewhere ask for their episodes.

    Attributes:
        counts: number of rejected calls by the error's code.
        patient: wait without a bound for programs that ask for episodes, and listen also between episodes.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, programs: bool = True) -> None:
        self.host, self.port, self.programs, self.patient = host, port, programs, False
        self.counts: Counter[str] = Counter()
        self._sessions: dict[str, Session] = {}
        self._ended_ids: deque[str] = deque(maxlen=REMEMBERED)
        self._requests: asyncio.Queue[tuple[web.Request, asyncio.Future[Session]]] = asyncio.Queue()
        self._loop: EventLoopThread | None = None
        self._runner: web.AppRunner
        self._address = ""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Gateway, (self.host, self.port, self.programs)  # another process has its own endpoint

    def start(self) -> str:
        """Listen, unless it does, and return ``http://HOST:PORT``.

        Raises:
            RemoteError: the address cannot be used.
        """
        with self._lock:
            if self._loop is None:
                self._loop = EventLoopThread()
                try:
                    self._loop.submit(self._listen()).result()
                except (OSError, OverflowError) as error:
                    self._loop.close()
                    self._loop = None
                    raise RemoteError(
                        f"the gateway cannot listen at {self.host}:{self.port}: {error}; choose another port"
                    ) from error
            return self._address

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the gateway's event loop; the gateway must have started."""
        assert self._loop is not None
        return self._loop.submit(coroutine)

    async def run(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Return the result of an ``async`` function that runs on the gateway's event loop."""
        return await asyncio.wrap_future(self.submit(function(*arguments)))

    def add(self, session: Session) -> Session:
        """Begin an episode; its calls are served until :meth:`remove`."""
        with self._lock:
            self.start()
            self._sessions[session.id] = session
        return session

    async def remove(self, session: Session) -> None:
        """End an episode; on the gateway's event loop."""
        try:
            await session.end()
        finally:  # not before: :meth:`rest` would close the loop that ends it
            if self._sessions.pop(session.id, None) is not None:
                self._ended_ids.append(session.id)

    def endpoint(self, session: Session, address: str = "") -> Endpoint:
        """Return the addresses and the key for the program of an episode, which may know the gateway by another one."""
        address = address or self._address
        return Endpoint(f"{address}/v1", KEY + session.id, f"{address}/episodes/{session.id}")

    def rest(self) -> None:
        """Stop listening if there is no episode."""
        with self._lock:
            if self._loop is None or self._sessions or self.patient:
                return
            loop, self._loop = self._loop, None
            loop.submit(self._close()).result()
            loop.close()

    async def _close(self) -> None:
        while not self._requests.empty():
            _, future = self._requests.get_nowait()
            future.set_exception(
                ProtocolError(503, "no_episode", "the endpoint closes; end the program, or ask again in a later run")
            )
        await self._runner.cleanup()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Listen until the end of the block, with :attr:`patient`."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False
            self.rest()

    async def give(self, session: Session) -> None:
        """Give an episode to the program that has asked first, or to the next one that asks; on the event loop.

        Raises:
            ProgramError: no program asks within the episode's lease.
        """
        seconds = None if self.patient else session.limits.lease_seconds
        try:
            request, future = await asyncio.wait_for(self._requests.get(), seconds)
            while request.transport is None or request.transport.is_closing():  # its program is gone
                future.cancel()  # ends the task that answers it
                request, future = await asyncio.wait_for(self._requests.get(), seconds)
        except TimeoutError:
            raise ProgramError(
                f"no program opened the episode within {session.limits.lease_seconds:g} s; start one that posts to "
                f"{self._address}/episodes, or raise `lease_seconds`"
            ) from None
        future.set_result(session)

    async def _listen(self) -> None:
        self._requests = asyncio.Queue()  # of this loop
        app = web.Application(client_max_size=BODY_MB << 20, middlewares=[self._with_refusals])
        app.add_routes(
            [
                *(web.post(path, self._call) for path in _FORMS),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._models),
                web.post("/episodes", self._open),
                web.post("/episodes/{id}/reward", self._reward),
                web.post("/episodes/{id}/end", self._end),
            ]
        )
        leave_out_malformed_requests()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, backlog=1024).start()
        self._address = f"http://{self.host}:{self._runner.addresses[0][1]}"

    @web.middleware
    async def _with_refusals(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer a request; refusals are counted and have the protocol's form."""
        try:
            return await handler(request)
        except ConnectionError:
            return web.Response()  # the client has left
        except (ProtocolError, web.HTTPException) as error:
            refusal = error if isinstance(error, ProtocolError) else _not_served(request, error.status)
            session = self._sessions.get(_key(request).partition(".")[0].removeprefix(KEY))
            if session is not None:
                session.counts["refused"] += 1
                session.refusal = str(refusal)
            self.counts[refusal.code] += 1
            if self.counts[refusal.code] == 1 and refusal.code not in (LEFT, TOO_LONG):  # frameworks may hide it
                logger.warning("the gateway refused a call: %s", refusal)
            return _refusal(request, refusal)
        except Exception as error:  # one call does not end the server
            logger.exception("a call failed in the gateway")
            return _refusal(request, ProtocolError(500, "internal", f"{type(error).__name__}: {error}"))

    def _session(self, key: str) -> Session:
        id = key.partition(".")[0].removeprefix(KEY)
        if (session := self._sessions.get(id)) is not None:
            return session
        if id in self._ended_ids:
            raise ended()
        raise ProtocolError(
            401, "invalid_api_key", "the key is of no episode; use the OPENAI_API_KEY that the program was started with"
        )

    def _agent(self, key: str, session: Session, model: str) -> str:
        """Return the agent of a call: the one in its key, else the one that its model names, else the only one."""
        agent = key.partition(".")[2] or model
        if agent in session.agents:
            return agent
        if len(session.agents) == 1 and agent == model:
            return session.agents[0]
        text = f"there is no agent {agent!r:.60}; name one as the model or in the key: {', '.join(session.agents)}"
        raise ProtocolError(404, "model_not_found", text, "model")

    async def _call(self, request: web.Request) -> web.StreamResponse:
        read, body, events = _FORMS[request.path]
        key = _key(request)
        session = self._session(key)
        call = read(await _body(request), session.ignore)
        served = await session.ask(self._agent(key, session, call.model), call)
        name = secrets.token_hex(12)
        try:
            if request.transport is None or request.transport.is_closing():
                raise ConnectionError
            if not call.stream:
                return web.json_response(body(call, served, name))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            for event in events(call, served, name):
                await response.write(event.encode())
            await response.write_eof()
            return response
        except ConnectionError:
            session.counts["disconnected"] += 1
            raise

    async def _models(self, request: web.Request) -> web.Response:
        key, model = _key(request), request.match_info.get("model", "")
        session = self._session(key)
        if model:
            self._agent(key, session, model)  # raises where a call that names it would
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "mrlm"} for name in session.agents]
        return web.json_response(models[0] | {"id": model} if model else {"object": "list", "data": models})

    async def _open(self, request: web.Request) -> web.Response:
        """Give an episode to a program that was started elsewhere, as soon as there is one."""
        token = read_token(None)
        if token is not None and not carries_token(f"Bearer {_key(request)}", token):
            raise ProtocolError(401, "invalid_api_key", "send MRLM_TOKEN of the gateway as the key of `POST /episodes`")
        if token is None and is_foreign(origin := request.headers.get("Origin")):
            fault = f"Origin {origin!r:.80} is a page of another machine; open it at localhost, or start the gateway"
            raise ProtocolError(403, "foreign_origin", f"{fault} with MRLM_TOKEN and send it as the key")
        future: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, future))
        session = await future
        endpoint = self.endpoint(session, f"{request.scheme}://{request.host}")  # as the program reaches it
        return web.json_response(
            {
                "id": session.id,
                "base_url": endpoint.base_url,
                "api_key": endpoint.key,
                "url": endpoint.url,
                "agents": session.agents,
                "row": session.row,
            }
        )

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request.match_info["id"])
        body = await _body(request)
        if not isinstance(body, Mapping):
            raise ProtocolError(400, "invalid_reward", 'the body must be rewards by agent, as in {"planner": 1.0}')
        session.reward(body)
        return web.json_response({})

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session(request.match_info["id"])
        body = await _body(request)
        if not isinstance(body, Mapping) or self.programs:
            text = "the body must be an object with `output` or `error`, and the episode of a program started elsewhere"
            raise ProtocolError(400, "invalid_request", text)
        if not session.program.done():
            if body.get("error"):
                session.program.set_exception(ProgramError(f"the program reported: {body['error']}"))
            else:
                session.program.set_result(body.get("output"))
        return web.json_response({})


def _not_served(request: web.Request, status: int) -> ProtocolError:
    """Return the refusal of an address or a method that is not served."""
    served = ", ".join(f"POST {path}" for path in (*_FORMS, "/episodes"))
    text = f"{request.method} {request.path[:60]} is not served; there are {served} and GET /v1/models"
    return ProtocolError(status, "not_found", text)


def _refusal(request: web.Request, error: ProtocolError) -> web.Response:
    """Return an error in the form of the protocol of the request."""
    body = messages_error(error) if request.path.startswith("/v1/messages") else error.body()
    return web.json_response(body, status=error.status)


def _key(request: web.Request) -> str:
    """Return the key of a request; on pages of an episode the key in its path."""
    if "id" in request.match_info:
        return request.match_info["id"]
    header = request.headers.get("x-api-key", "") or request.headers.get("Authorization", "")
    return header.removeprefix("Bearer ").strip()


async def _body(request: web.Request) -> Any:
    try:
        body = json.loads(await request.text() or "{}")
        if nested_too_deeply(body):
            raise ValueError(f"it is nested more than {MAX_LEVELS} levels deep")
        return body
    except web.HTTPRequestEntityTooLarge:
        raise ProtocolError(413, "body_too_large", f"the body is larger than {BODY_MB} MiB; send less") from None
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise ProtocolError(400, "invalid_json", f"the body cannot be read as JSON: {error}") from None
