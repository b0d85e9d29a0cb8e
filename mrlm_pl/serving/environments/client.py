"""An environment that lives on a server, used like any other."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from mrlm_pl import errors
from mrlm_pl.concurrency.backoff import Backoff
from mrlm_pl.concurrency.event_loop import mark_read
from mrlm_pl.environment import Environment, Observations, Step, TaskSource, ToolSchema
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, RemoteError, RemoteTimeoutError
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.addresses import Servers, addresses_of, warn_of_difference
from mrlm_pl.serving.transport.codec import from_json, step_from, to_json
from mrlm_pl.serving.transport.connection import CONTROLLER_SECONDS, Address, StatusError, connection, submit
from mrlm_pl.serving.transport.security import Identity
from mrlm_pl.settings import PositiveFloat

logger = logging.getLogger(__name__)

ASK_SECONDS = 30.0
TASKS_AT_ONCE = 64
KEPT_PARTS = 16
"""Parts of an endless split that are kept: its tasks follow each other, and a run reads any number."""

REACH_SECONDS = 3.0
ASK_AGAIN_SECONDS = 60.0
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
_ELSEWHERE = (*_GONE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Statuses after which another server, or the same one later, may open the session."""


class RemoteEnvironment(Environment, proxy=True):
    """An environment on one of several servers (``mrlm serve``).

    Each episode is a session on one server. A server that is full, going down or gone is skipped and tried again later.
    When a server dies, its episodes fail and are retried like other failed episodes.

    Args:
        address: ``HOST:PORT`` of a server, or of several.
        name: the environment's name on the server.
        settings: arguments of the environment, which override those of the server.
        token_file: file with the token; without it, the environment variable ``MRLM_TOKEN``.
        tls_authority: PEM file of the certificates that sign the servers'; with it the connection is encrypted.
        tls_certificate: PEM file of this client's certificate, where servers require one.
        tls_key: PEM file of the key of this certificate.
        open_seconds: deadline for opening a session on some server.
        step_seconds: deadline of a step.
        message_mb: maximum size of a message, in MiB; the server's limit counts where it is smaller.

    Raises:
        ConfigurationError: no address is given, or one is not ``HOST:PORT``; a number is out of range; a file cannot be
            read.
    """

    def __init__(
        self,
        address: str | list[str],
        name: str,
        settings: dict[str, Any] | None = None,
        token_file: str | None = None,
        tls_authority: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        open_seconds: PositiveFloat = 60.0,
        step_seconds: PositiveFloat = 90.0,
        message_mb: int = 16,
    ) -> None:
        identity = Identity(tls_certificate, tls_key, tls_authority)
        self.addresses = addresses_of(address, token_file, identity, message_mb)
        self.name, self.settings, self._who = name, dict(settings or {}), f"environment {name!r}"
        self.open_seconds, self.step_seconds = open_seconds, step_seconds
        self._agents: tuple[str, ...] | None = None
        self._tools: dict[str, tuple[ToolSchema, ...]] = {}
        self._finalizer: weakref.finalize[[Address, str, int], RemoteEnvironment] | None = None

    @property
    def agents(self) -> tuple[str, ...]:  # type: ignore[override] # requested at the first read
        """The agents, as the first server that answers has them.

        Raises:
            RemoteTimeoutError: no server answers.
            ConfigurationError: there is no such environment, or its settings are wrong.
        """
        if self._agents is None:  # no cached_property: before Python 3.12 all instances would wait for one another
            request = pb.DescribeRequest(environment=self.name, settings=to_json(self.settings))
            reply = self._ask("Describe", request)
            with _protocol_of(self._servers.targets):
                self._agents = tuple(reply.environments[0].agents)
        return self._agents

    def tasks(self, split: str) -> TaskSource:
        """Return the server's tasks, read in parts; see :meth:`Environment.tasks`."""
        return RemoteTasks(self, split)

    def identity(self, task: Task) -> str | None:
        """Return the identity by the environment on the server; empty if an earlier version serves it."""
        reply = self.read_tasks(task.split, task.index, 1, identities=True)
        with _protocol_of(self._servers.targets):
            return from_json(reply.identities, list[str | None])[0] if reply.identities else ""

    def read_tasks(self, split: str, start: int, count: int, *, identities: bool = False) -> pb.TasksReply:
        """Return the server's tasks of a split from an index on, as many as are asked for or left."""
        settings = to_json(self.settings)
        request = pb.TasksRequest(
            environment=self.name, settings=settings, split=split, start=start, count=count, identities=identities
        )
        reply: pb.TasksReply = self._ask("GetTasks", request)
        return reply

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the tools of the current episode."""
        return self._tools.get(agent, ())

    async def reset(self, task: Task) -> Observations:  # type: ignore[override] # async versions are accepted
        """Open a session; see :meth:`Environment.reset`.

        Raises:
            RemoteTimeoutError: no server opens one in time.
            RemoteError: a server rejects the call.
        """
        self.close()
        opening = submit(self._open(task))
        try:
            await asyncio.wait([answer := asyncio.wrap_future(opening)])  # which does not cancel it
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            answer.add_done_callback(mark_read)
            raise
        opened, address = answer.result()
        self._address, self._session, self._turn = address, opened.session, 0
        # An environment that is dropped without close() must not renew its lease.
        self._finalizer = weakref.finalize(self, _close_in_background, address, opened.session, os.getpid())
        with _protocol_of(address.target):
            self._tools = from_json(opened.tools, dict[str, tuple[ToolSchema, ...]])
            return from_json(opened.observations, dict[str, tuple[Message, ...]])

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        """Take a turn; see :meth:`Environment.step`.

        Raises:
            RemoteTimeoutError: the server is silent.
            RemoteError: the server is gone, or rejects the call.
        """
        if self._finalizer is None:
            raise EnvironmentContractError(f"environment {self.name!r}: step was called before reset; call reset first")
        request = pb.StepRequest(session=self._session, turn=self._turn, actions=to_json(actions))
        step = await asyncio.wrap_future(submit(self._step(self._address, request)))
        self._turn += 1
        return step

    def close(self) -> None:
        """End the session, if there is one."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteEnvironment:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._finalizer = None  # a session has one owner
        copied._tools = {}
        return copied

    async def _open(self, task: Task) -> tuple[pb.OpenReply, Address]:
        request = pb.OpenRequest(
            environment=self.name,
            settings=to_json(self.settings),
            task=to_json(task),
            client=f"{os.uname().nodename}:{os.getpid()}",  # servers divide their time fairly between names
            key=secrets.token_urlsafe(16),
        )
        late = f"{self._who}: no server opened a session within {self.open_seconds:g} s"
        reply, address = await self._servers.first_answer(
            lambda server, left: server.call("Open", request, self.step_seconds), self.open_seconds, _ELSEWHERE, late
        )
        what = self.addresses, self.name, request.settings
        fault = f"hosts {self._who} with other settings ({{changed}}) than"
        warn_of_difference(what, reply.direct or address.target, reply.settings, fault)
        with _protocol_of(address.target):
            if not 0 < reply.lease_seconds < math.inf:
                raise RemoteError(f"a lease of {reply.lease_seconds} s")
            worker = replace(address, target=reply.direct or address.target)
        server = await connection(address)
        if reply.direct:
            server.patience = CONTROLLER_SECONDS
            if await _reaches(worker, reply.session):
                server, address = await connection(worker), worker
        server.hold(reply.session, reply.lease_seconds)
        return reply, address

    async def _step(self, address: Address, request: pb.StepRequest) -> Step:
        server = await connection(address)

        # No session is opened at an address that is not listed: it is a controller's worker, and the next session asks
        # whether it can be reached, rather than a step find out.
        def note_lost(problem: Exception) -> None:
            if address in self.addresses:
                self._servers.note_gone(address, problem, self.open_seconds)
            else:
                _reached.pop(address, None)

        backoff = Backoff(self.step_seconds)
        while True:
            try:
                reply = await server.call("Step", request, self.step_seconds)
                if (reply.session, reply.turn) != (request.session, request.turn):
                    raise RemoteError(
                        f"{address.target} answered turn {reply.turn} of session {reply.session!r}, not turn "
                        f"{request.turn} of {request.session!r}"
                    )
                with _protocol_of(address.target):
                    return step_from(reply.step)
            except RemoteError as error:
                note_lost(error)
                raise
            except StatusError as error:
                overloaded = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.too_large
                if not overloaded and (error.transient or error.code in _GONE):
                    note_lost(error)
                # An overloaded server rejects before anything is done.
                if not overloaded or not await backoff.pause():
                    raise _error_of(error, f"environment {self.name!r}, turn {request.turn}") from error

    def _ask(self, method: str, request: Any) -> Any:
        """Return the reply of the first server that gives one."""
        late = (
            f"{self._who}: no server answers at {self._servers.targets} within {ASK_SECONDS:g} s; start one with "
            "`mrlm serve`, or check the address and whether both sides use TLS"
        )
        asking = self._servers.first_answer(
            lambda server, left: server.call(method, request, ASK_SECONDS, patience=0),
            ASK_SECONDS,
            (*_ELSEWHERE, grpc.StatusCode.DEADLINE_EXCEEDED),
            late,
            rotate=False,
        )
        return submit(asking).result()[0]

    @property
    def _servers(self) -> Servers:
        return Servers(self.addresses, self._who, lambda error, address: _error_of(error, self._who))


class RemoteTasks(TaskSource):
    """The tasks of a split of a remote environment, read in parts.

    Args:
        environment: remote environment.
        split: name of the split.

    Raises:
        ConfigurationError: the split is unknown, or its data cannot be read.
    """

    def __init__(self, environment: RemoteEnvironment, split: str) -> None:
        self._environment, self.split = environment, split
        self._parts: dict[int, list[Task]] = {}
        reply = self._read(0)
        self.size = reply.size if reply.HasField("size") else None

    def __getitem__(self, index: int) -> Task:
        self._check_index(index)
        part, offset = divmod(index, TASKS_AT_ONCE)
        if part not in self._parts:
            self._read(part)
        return self._parts[part][offset]

    def _read(self, part: int) -> pb.TasksReply:
        start = part * TASKS_AT_ONCE
        reply = self._environment.read_tasks(self.split, start, TASKS_AT_ONCE)
        with _protocol_of(self._environment._servers.targets):
            tasks = from_json(reply.tasks, list[Task])
            left = max(reply.size - start, 0) if reply.HasField("size") else TASKS_AT_ONCE
            if len(tasks) != min(left, TASKS_AT_ONCE):
                raise RemoteError(f"{len(tasks)} tasks of {self.split!r} from {start} on, of {left} that are left")
        self._parts[part] = tasks
        if not reply.HasField("size") and len(self._parts) > KEPT_PARTS:
            del self._parts[next(iter(self._parts))]
        return reply


@contextmanager
def _protocol_of(server: str) -> Iterator[None]:
    """Name the server in the error of an answer that is not of the protocol."""
    try:
        yield
    except (RemoteError, ConfigurationError, IndexError) as error:
        raise RemoteError(f"{server} gave an answer that is not of the protocol: {error}") from error


_reached: dict[Address, tuple[bool, float]] = {}


async def _reaches(worker: Address, session: str) -> bool:
    """Return whether a worker and its session can be reached; a failure is remembered for a while."""
    reachable, asked_at = _reached.get(worker, (False, -math.inf))
    now = asyncio.get_running_loop().time()
    if not reachable and now - asked_at > ASK_AGAIN_SECONDS:
        server = await connection(worker)
        with suppress(StatusError):
            reply = await server.call("KeepAlive", pb.KeepAliveRequest(sessions=[session]), REACH_SECONDS)
            reachable = not reply.unknown
        _reached[worker] = reachable, now
    return reachable


def _close_in_background(address: Address, session: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has copies of its parent's environments, but not their sessions
        submit(_close(address, session))


def _close_unwanted(opening: Future[tuple[pb.OpenReply, Address]]) -> None:
    """Close a session whose caller has been cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opened, address = opening.result()
        _close_in_background(address, opened.session, os.getpid())


async def _close(address: Address, session: str) -> None:
    server = await connection(address)
    server.leases.pop(session, None)
    with suppress(StatusError):  # the session is gone with its server, or its lease will end it
        await server.call("Close", pb.CloseRequest(session=session), ASK_SECONDS)


def _error_of(error: StatusError, what: str) -> Exception:
    """Return the environment's own error if its class is known here, else one of the connection."""
    name, colon, text = error.text.partition(": ")
    cls = getattr(errors, name, None)
    if colon and isinstance(cls, type) and issubclass(cls, errors.MRLMError):
        return cls(text)
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RemoteTimeoutError(f"{what}: {error.text}")
    if error.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND) and "session" not in error.text:
        return ConfigurationError(f"{what}: {error.text}")
    return RemoteError(f"{what}: {error}")
