"""A client's connection to one server: one stream for all sessions, operations in batches, re-connection, keep-alive.

Every operation may be sent again: opening has a key, a step its turn. So when the stream breaks, whatever is unanswered
is sent again on the next one, and nothing is done twice.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from mrlm_pl.concurrency.backoff import Backoff, until
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.errors import RemoteError
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.exchange import MESSAGE_MARGIN, SIZE_HEADER, smaller_size
from mrlm_pl.serving.transport.security import PLAIN, Identity, read_token, with_token
from mrlm_pl.settings import between, check_address

T = TypeVar("T")
MAX_BATCH = 256
MAX_BATCH_BYTES = 1 << 20
LARGEST_MESSAGE_MB = 2047
RECONNECT_SECONDS = 1.5
"""A server that cannot be reached for so long is gone, and its sessions with it."""

CONTROLLER_SECONDS = 20.0
"""The same of a controller, whose sessions live on its workers while it is started again."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
GOODBYE_SECONDS = 2.0
_CODES = {code.value[0]: code for code in grpc.StatusCode}
FINAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
"""Statuses that asking again does not change."""


class StatusError(Exception):
    """A status that a server, or the network, gave in place of a reply."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code, self.text = code, text


class SilenceError(StatusError):
    """No answer came in time, unlike a server's report of an environment that takes too long."""


@dataclass(frozen=True)
class Address:
    """A server's address and the terms of a connection to it.

    Args:
        target: ``HOST:PORT``.
        token_file: file with the token; None takes ``MRLM_TOKEN``.
        identity: for TLS.
        message_mb: size of the largest message, in MiB.

    Raises:
        ConfigurationError: the target is not ``HOST:PORT``, or the size is out of range.
    """

    target: str
    token_file: str | None = None
    identity: Identity = PLAIN
    message_mb: int = 16

    def __post_init__(self) -> None:
        check_address(self.target)
        between(1, LARGEST_MESSAGE_MB, "", message_mb=self.message_mb)

    @property
    def message_bytes(self) -> int:
        """Size of the largest message, in bytes."""
        return self.message_mb << 20


class Connection:
    """A connection; all methods run on its event loop.

    Args:
        address: of the server.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[pb.Operation, asyncio.Future[Any]]] = {}
        self._unsent: deque[pb.Operation] = deque()
        self._wake = asyncio.Event()
        self._stream = 0
        self._runner: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.leases: dict[str, float] = {}
        self.patience = RECONNECT_SECONDS
        self._largest = address.message_bytes
        options = [
            ("grpc.max_receive_message_length", address.message_bytes),
            ("grpc.max_send_message_length", address.message_bytes),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 15_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 1000),  # the time for a connection: three round trips with TLS
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        credentials = address.identity.for_client()
        self._metadata = with_token(read_token(address.token_file))
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address.target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address.target, credentials, options=options)
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)
        self._stubs: dict[Callable[[Any], Any], Any] = {}

    async def operation(self, timeout: float, **request: Any) -> Any:
        """Return the reply to an operation, such as ``step=StepRequest(...)``.

        Raises:
            StatusError: it was refused, the server is gone, or there was no answer in time.
            RemoteError: it is larger than messages may be.
        """
        operation = pb.Operation(id=next(self._ids), **request)
        size = operation.ByteSize()
        if size > self._largest - MESSAGE_MARGIN:
            raise RemoteError(
                f"a request to {self.address.target} has {size / (1 << 20):.1f} MiB, and messages may have up to "
                f"{self._largest >> 20}; make it smaller, or raise message_mb on both sides"
            )
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[operation.id] = (operation, future)
        self._unsent.append(operation)
        self._wake.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.ensure_future(self._run())
        try:
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError as error:
            text = f"{self.address.target} did not answer within {timeout:g} s"
            raise SilenceError(grpc.StatusCode.DEADLINE_EXCEEDED, text) from error
        finally:
            self._pending.pop(operation.id, None)

    async def unary(self, method: str, request: Any, timeout: float, wait: bool = True) -> Any:
        """The reply of a method outside of the stream; with ``wait`` a server that cannot be reached is waited for.

        Raises:
            StatusError: as for :meth:`operation`.
        """
        return await self.of(environment_pb2_grpc.EnvironmentServiceStub, method, request, timeout, wait)

    async def of(
        self, service: Callable[[Any], Any], method: str, request: Any, timeout: float, wait: bool = True
    ) -> Any:
        """Return the reply of a method of any service, which is named by its class of stubs.

        Raises:
            StatusError: as for :meth:`operation`.
        """
        if service not in self._stubs:
            self._stubs[service] = service(self._channel)
        call = getattr(self._stubs[service], method)
        try:
            return await call(request, timeout=timeout, metadata=self._metadata, wait_for_ready=wait)
        except grpc.aio.AioRpcError as error:
            text = f"{self.address.target}: {error.details()}"
            raise StatusError(error.code(), text) from error

    def join(self, reports: AsyncIterator[pb.WorkerReport]) -> AsyncIterator[pb.WorkerOrder]:
        """Return a controller's answers to a worker's reports."""
        return environment_pb2_grpc.ControllerServiceStub(self._channel).Join(reports, metadata=self._metadata)

    @property
    def unanswered(self) -> int:
        """Operations that are under way."""
        return len(self._pending)

    def hold(self, session: str, lease_seconds: float) -> None:
        """Keep a session's lease alive until it is released."""
        self.leases[session] = lease_seconds
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.ensure_future(self._keep())

    def release(self, session: str) -> None:
        """Keep it no longer."""
        self.leases.pop(session, None)

    async def close(self, gone: str = "") -> None:
        """End the connection; what is unanswered fails, as UNAVAILABLE if the other end is ``gone``: it says how."""
        for task in (self._runner, self._keeper):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if gone:
            self._fail(grpc.StatusCode.UNAVAILABLE, gone)
        self._fail(grpc.StatusCode.CANCELLED, "the connection was closed")
        await self._channel.close()

    async def _run(self) -> None:
        """Keep a stream to the server while anything is unanswered."""
        backoff: Backoff | None = None
        while self._pending:
            backoff, answered = backoff or Backoff(self.patience, FIRST_PAUSE, LONGEST_PAUSE), False
            try:
                streams: list[Any] = []
                told = (*self._metadata, (SIZE_HEADER, str(self.address.message_bytes)))
                streams.append(self._stub.Exchange(self._requests(streams), metadata=told))
                await self._agree(streams[0])
                async for reply in streams[0]:
                    answered = True
                    for result in reply.results:
                        self._settle(result)
                problem = StatusError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")
            except grpc.aio.AioRpcError as error:
                problem = StatusError(error.code(), error.details() or "the stream broke")
            except Exception as error:  # a server that talks nonsense makes the library raise all kinds of errors
                problem = StatusError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            if answered:
                backoff = Backoff(self.patience, FIRST_PAUSE, LONGEST_PAUSE)
            if problem.code in FINAL or not await backoff.pause():
                self._fail(problem.code, f"{self.address.target}: {problem.text}")
                backoff = None

    async def _agree(self, stream: Any) -> None:
        """Take over the server's limit where it is below this end's; too large a message would break the stream."""
        self._largest = smaller_size(self.address.message_bytes, await stream.initial_metadata())

    async def _requests(self, streams: list[Any]) -> AsyncIterator[pb.BatchRequest]:
        """Yield all that is unanswered, then whatever comes, in batches, until the stream has ended.

        An error in it would make the library format a traceback in this thread, which disturbs a compilation that goes
        on in another one (CPython 3.11, issue 106905).
        """
        self._stream = stream = self._stream + 1
        self._unsent = deque(operation for operation, _ in self._pending.values())
        while True:
            while self._unsent:
                if any(call.done() for call in streams):
                    return
                yield pb.BatchRequest(operations=self._next_batch())
                if stream != self._stream:
                    return  # this stream broke, and the one after it has the operations
            self._wake.clear()
            try:
                await self._wake.wait()
            except asyncio.CancelledError:
                return
            if stream != self._stream:
                self._wake.set()
                return

    def _next_batch(self) -> list[pb.Operation]:
        """Operations that are unsent, as many as fit into a message."""
        batch: list[pb.Operation] = []
        size = 0
        while self._unsent and len(batch) < MAX_BATCH:
            operation = self._unsent[0]
            if operation.id in self._pending:
                size += operation.ByteSize() + 10
                if batch and size > MAX_BATCH_BYTES:
                    break
                batch.append(operation)
            self._unsent.popleft()
        return batch

    def _settle(self, result: pb.Result) -> None:
        found = self._pending.get(result.id)
        if found is None or found[1].done():
            return  # nobody waits for it any more
        operation, future = found
        if result.code:
            code = _CODES.get(result.code, grpc.StatusCode.UNKNOWN)
            future.set_exception(StatusError(code, result.message))
        elif result.WhichOneof("reply") != operation.WhichOneof("request"):
            text = f"{self.address.target} answered a request of another kind"
            future.set_exception(StatusError(grpc.StatusCode.INTERNAL, text))
        else:
            future.set_result(getattr(result, result.WhichOneof("reply")))

    def _fail(self, code: grpc.StatusCode, text: str) -> None:
        for _, future in list(self._pending.values()):
            if not future.done():
                future.set_exception(StatusError(code, text))
        self._pending.clear()

    async def _keep(self) -> None:
        while self.leases:
            await asyncio.sleep(max(min(self.leases.values()) / 3, 0.05))
            names = list(self.leases)
            for start in range(0, len(names), 1000):
                request = pb.KeepAliveRequest(sessions=names[start : start + 1000])
                with suppress(StatusError):  # whoever steps the session next is told
                    reply = await self.operation(10.0, keep_alive=request)
                    for session in reply.unknown:
                        self.leases.pop(session, None)


class _Process:
    """Shared state of one process: an event loop in a thread, and a connection for each address."""

    def __init__(self) -> None:
        self.id = os.getpid()
        self.loop = EventLoopThread()
        self.connections: dict[Address, Connection] = {}


_lock = threading.Lock()
_process: _Process | None = None
_parents: list[_Process] = []
"""State of the process that this one was forked from; to free it here would end this process."""


def _shared() -> _Process:
    global _process
    with _lock:
        if _parents:  # gRPC would wait for ever for a thread that only the parent has
            raise RemoteError(
                "this process was forked from one that had already talked to servers, and gRPC cannot work in it; fork "
                "before the first call, or start it with `spawn`"
            )
        if _process is None:
            _process = _Process()
        return _process


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the event loop of all connections.

    Raises:
        RemoteError: this process was forked from one that had called this.
    """
    try:
        return _shared().loop.submit(coroutine)
    except RemoteError:
        coroutine.close()
        raise


async def connection(address: Address) -> Connection:
    """Return the connection to an address; to be awaited on the loop of :func:`submit`."""
    connections = _shared().connections
    if address not in connections:
        connections[address] = Connection(address)
    return connections[address]


@atexit.register
def _say_goodbye() -> None:
    """Close what is still open, so that servers need not wait for the leases to run out."""
    if _process is None or _process.id != os.getpid():
        return
    with suppress(Exception):  # the process ends all the same, and the leases are the safety net
        _process.loop.submit(_close_all(_process)).result(GOODBYE_SECONDS)


async def _close_all(process: _Process) -> None:
    closing = [
        server.operation(GOODBYE_SECONDS, close=pb.CloseRequest(session=session))
        for server in process.connections.values()
        for session in server.leases
    ]
    await asyncio.gather(*closing, return_exceptions=True)
    # Environments that were dropped close their sessions by themselves.
    await until(lambda: not any(server.unanswered for server in process.connections.values()), GOODBYE_SECONDS)
    for server in process.connections.values():
        await server.close()


def client_name() -> str:
    """Return a name for this process, by which servers share out their time."""
    return f"{os.uname().nodename}:{os.getpid()}"


def _forget_after_fork() -> None:
    global _process, _lock
    if _process is not None:
        _parents.append(_process)
    _process, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
