"""The service: opens, steps and ends sessions."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from mrlm_pl.concurrency.calls import DeadlineError, QueueFullError, Workers, as_error
from mrlm_pl.concurrency.event_loop import mark_read
from mrlm_pl.environment import Environment, Message, Observations, Step, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, RemoteError
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.sessions import Session, SessionTable
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.codec import from_json, to_json
from mrlm_pl.serving.transport.connection import RefusalError, StatusError, refuse

logger = logging.getLogger(__name__)

Code = grpc.StatusCode
MAX_TASKS = 1000
MAX_KEY_CHARACTERS = 128


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Args:
        lease_seconds: idle time after which a session ends; clients may request less.
        step_seconds: deadline of one call of an environment.
        sessions: maximum number of live sessions.
        message_mb: maximum size of a message, in MiB.
    """

    lease_seconds: float = 120.0
    step_seconds: float = 60.0
    sessions: int = 20_000
    message_mb: int = 16


def _unary(method: str) -> Any:
    """Return an RPC handler that calls a method of the service and turns exceptions into statuses."""

    async def handler(self: EnvironmentService, request: Any, context: Any) -> Any:
        try:
            return await getattr(self, method)(request)
        except (Exception, asyncio.CancelledError) as error:  # an environment may raise anything
            if isinstance(error, asyncio.CancelledError) and context.cancelled():
                raise
            refusal = refusal_of(error)
            return await refuse(context, refusal.code, refusal.text)

    return handler


class EnvironmentService(environment_pb2_grpc.EnvironmentServiceServicer):
    """The gRPC service over an offer of environments.

    Args:
        offer: environments to serve.
        workers: threads that call the environments.
        limits: limits of the server.
    """

    def __init__(self, offer: Offer, workers: Workers, limits: Limits) -> None:
        self.offer, self.workers, self.limits = offer, workers, limits
        self.sessions = SessionTable()
        self.draining = False
        self.opening = 0
        self.steps_total = self.expired_total = self.failed_total = 0
        self._opened: dict[str, asyncio.Future[pb.OpenReply]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, request: pb.OpenRequest) -> pb.OpenReply:
        """Return a new session, or the one that was opened with the same key and has made no turn yet."""
        if len(request.key) > MAX_KEY_CHARACTERS:
            raise RefusalError(Code.INVALID_ARGUMENT, f"a key may have {MAX_KEY_CHARACTERS} characters")
        identifier = self.sessions.id_of(request.key)
        opened = self._opened.get(identifier)
        if opened is None:
            if self.sessions.had(identifier):
                text = "the session of this key has made a turn or is over; use a new key"
                raise RefusalError(Code.ALREADY_EXISTS, text)
            opened = self._opened[identifier] = asyncio.ensure_future(self._open(request, identifier))
            opened.add_done_callback(lambda done: self._forget_failure(identifier, done))
        # A request without a key cannot be repeated, so its opening ends with it.
        return await (asyncio.shield(opened) if request.key else opened)

    async def step(self, request: pb.StepRequest) -> pb.StepReply:
        """Return the answer to a turn; a repeated request has the same answer, during the turn and after it."""
        session = self.sessions.find(request.session)
        self._opened.pop(session.id, None)  # the client has the answer to its opening, which may be large
        if session.reply is not None and request.turn == session.turn - 1:
            return session.reply
        if request.turn != session.turn:
            raise RefusalError(
                Code.FAILED_PRECONDITION, f"the session is at turn {session.turn}, and the request is of {request.turn}"
            )
        if session.failure is not None:
            raise session.failure
        if session.busy is None:
            actions = from_json(request.actions, dict[str, Message])
            if session.quick:
                try:
                    return self._record_step(session, session.environment.step(actions))
                except BaseException as raised:  # an environment may raise anything
                    raise self._turn_error(session, as_error(raised)) from raised
            # A task of its own: if the caller disconnects, the turn is executed all the same, for its repetition.
            session.busy = asyncio.ensure_future(self._make_step(session, actions))
            session.busy.add_done_callback(mark_read)
        return await asyncio.shield(session.busy)

    async def keep_alive(self, request: pb.KeepAliveRequest) -> pb.KeepAliveReply:
        """Renew leases; return the sessions that are gone."""
        sessions = {identifier: self.sessions.get(identifier) for identifier in request.sessions}
        for session in filter(None, sessions.values()):
            session.touch()
        return pb.KeepAliveReply(unknown=[identifier for identifier, session in sessions.items() if session is None])

    async def close(self, request: pb.CloseRequest) -> pb.CloseReply:
        """End a session; one that is gone is not an error, so that the request may be repeated."""
        session = self.sessions.get(request.session)
        if session is not None:
            self.end(session, "it was closed")
        return pb.CloseReply()

    def end(self, session: Session, reason: str) -> None:
        """Forget a session and close its environment in the background."""
        if not self.sessions.end(session, reason):
            return
        self._opened.pop(session.id, None)
        if session.busy is not None:
            session.busy.cancel()
        self._close_soon(session.client, session.name, session.environment)

    async def expire(self) -> None:
        """End the sessions whose lease has run out."""
        for session in self.sessions.expired():
            self.expired_total += 1
            self.end(session, f"its lease of {session.lease_seconds:g} s ran out without a call")

    async def _open(self, request: pb.OpenRequest, identifier: str) -> pb.OpenReply:
        if self.draining:
            raise RefusalError(Code.UNAVAILABLE, "the server is going down and opens no session; use another")
        if len(self.sessions) + self.opening >= self.limits.sessions:
            raise RefusalError(
                Code.RESOURCE_EXHAUSTED,
                f"{self.limits.sessions} sessions are live, as many as the server allows; raise its max_sessions",
            )
        lease = request.lease_seconds or self.limits.lease_seconds
        if not 0 < lease < math.inf:
            raise RefusalError(
                Code.INVALID_ARGUMENT, f"lease_seconds is {lease}; it must be above 0 and finite, or 0 for the server's"
            )
        task, settings = from_json(request.task, Task), settings_of(request)
        self.opening += 1
        try:
            return await self._begin(request, identifier, task, settings, min(lease, self.limits.lease_seconds))
        finally:
            self.opening -= 1

    async def _begin(
        self, request: pb.OpenRequest, identifier: str, task: Task, settings: dict[str, Any], lease_seconds: float
    ) -> pb.OpenReply:
        name, client = request.environment, request.client
        environment: Environment = await self.run(client, lambda: self.offer.template(name, settings).copy())
        try:
            observations: Observations = await self.run(client, partial(environment.reset, task))
            tools = await self.run(client, lambda: {agent: environment.tools(agent) for agent in environment.agents})
            reply = pb.OpenReply(lease_seconds=lease_seconds, observations=to_json(observations), tools=to_json(tools))
            reply.settings = self.offer.settings.get(name, "")
        except BaseException:  # also a cancellation
            self._close_soon(client, name, environment)
            raise
        quick = environment.quick and not inspect.iscoroutinefunction(environment.step)
        reply.session = identifier
        self.sessions.add(Session(identifier, environment, name, client, lease_seconds, quick))
        return reply

    async def _make_step(self, session: Session, actions: dict[str, Any]) -> pb.StepReply:
        try:
            return self._record_step(
                session, await self.run(session.client, partial(session.environment.step, actions))
            )
        except DeadlineError:
            self.failed_total += 1
            session.busy = None
            self.end(session, f"turn {session.turn} took longer than {self.limits.step_seconds:g} s")
            raise
        except Exception as error:  # an environment may raise anything
            raise self._turn_error(session, error) from error
        finally:
            session.busy = None
            session.touch()

    def _record_step(self, session: Session, step: Step) -> pb.StepReply:
        reply = pb.StepReply(session=session.id, turn=session.turn, step=to_json(step))
        session.turn += 1
        session.reply = reply
        self.steps_total += 1
        return reply

    def _turn_error(self, session: Session, error: Exception) -> Exception:
        """Return the error of a failed turn, which must not be repeated if it may have had side effects."""
        if isinstance(error, (EnvironmentContractError, QueueFullError)):
            return error  # nothing was executed, so the turn may be repeated
        session.failure = refusal_of(error)
        return session.failure

    def _close_soon(self, client: str, name: str, environment: Environment) -> None:
        if type(environment).close is Environment.close:
            return  # it has no resources
        task = asyncio.ensure_future(self._close(client, name, environment))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, client: str, name: str, environment: Environment) -> None:
        try:
            await self.workers.run(client, environment.close, self.limits.step_seconds, must=True)
        except Exception as error:  # an environment may raise anything
            logger.warning("closing a session of %s: %s", name, error)

    async def closed(self, timeout: float) -> None:
        """Wait until the environments of ended sessions are closed, for at most ``timeout`` seconds."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=timeout)

    async def run(self, client: str, function: Callable[[], Any]) -> Any:
        """Call a function on a thread, within the deadline of a step."""
        return await self.workers.run(client, function, self.limits.step_seconds)

    def _forget_failure(self, identifier: str, done: asyncio.Future[pb.OpenReply]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._opened.pop(identifier, None)

    Open = _unary("open")
    Step = _unary("step")
    KeepAlive = _unary("keep_alive")
    Close = _unary("close")
    Describe = _unary("describe")
    GetTasks = _unary("_tasks")
    ListSessions = _unary("_list")

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """Return names, agents and summaries of environments."""
        names = [request.environment] if request.environment else sorted(self.offer.factories)
        settings = settings_of(request)
        descriptions = []
        for name in names:
            template: Environment = await self.run("", lambda name=name: self.offer.template(name, settings))  # type: ignore[misc]
            summary = (inspect.getdoc(type(template)) or "").split("\n", 1)[0]
            descriptions.append(pb.EnvironmentDescription(name=name, agents=template.agents, summary=summary))
        return pb.DescribeReply(environments=descriptions)

    async def _tasks(self, request: pb.TasksRequest) -> pb.TasksReply:
        if request.start < 0 or not 0 <= request.count <= MAX_TASKS:
            raise RefusalError(
                Code.INVALID_ARGUMENT,
                f"start is {request.start} and count {request.count}; they must be 0 or above, count up to {MAX_TASKS}",
            )
        settings = settings_of(request)

        def read() -> pb.TasksReply:
            source = self.offer.source(request.environment, settings, request.split)
            stop = request.start + request.count
            stop = stop if source.size is None else min(stop, source.size)
            # A wrapper's tasks are those of the environment within; clients know them by the name here.
            tasks_inside = [source[index] for index in range(request.start, stop)]
            tasks = [replace(task, environment=request.environment) for task in tasks_inside]
            reply = pb.TasksReply(tasks=to_json(tasks), size=source.size)
            if request.identities:
                template = self.offer.template(request.environment, settings)
                reply.identities = to_json([template.identity(task) for task in tasks_inside])
            return reply

        return await self.run("", read)

    async def _list(self, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
        sessions = [session for session in self.sessions.values() if request.environment in ("", session.name)]
        listed = sessions[: request.limit] if request.limit > 0 else sessions
        return pb.ListSessionsReply(sessions=[session.description() for session in listed], total=len(sessions))


def settings_of(request: Any) -> dict[str, Any]:
    """Return the arguments of an environment in a request; none by default."""
    return from_json(request.settings or b"{}", dict[str, Any])


def refusal_of(error: BaseException) -> StatusError:
    """Return an error's status, with its class and text; a worker's status as the controller's.

    The error loses its frames. They refer to the request and the session, whose memory would be free only when cycles
    are collected, which is rare in a server.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    text = f"{type(error).__name__}: {error}"
    match error:
        case StatusError(too_large=True):  # clients repeat RESOURCE_EXHAUSTED, the status of a full server
            return RefusalError(Code.INVALID_ARGUMENT, f"{RemoteError.__name__}: {error.text}")
        case StatusError():
            return error
        case TimeoutError():  # also that of another server, before what else that one raises
            return RefusalError(Code.DEADLINE_EXCEEDED, text)
        case RemoteError() | ConfigurationError() | IndexError():
            return RefusalError(Code.INVALID_ARGUMENT, text)
        case EnvironmentContractError():
            return RefusalError(Code.FAILED_PRECONDITION, text)
        case QueueFullError():
            return RefusalError(Code.RESOURCE_EXHAUSTED, str(error))
        case asyncio.CancelledError():
            return RefusalError(Code.ABORTED, "the session was ended during its turn")
    return RefusalError(Code.ABORTED, text)
