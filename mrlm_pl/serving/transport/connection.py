"""A client's connection to one server: repeated requests where it breaks, and leases that are kept alive.

Every request may be repeated: opening has a key, a step its turn. So a request whose connection breaks is sent again,
and nothing is executed twice.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from mrlm_pl.concurrency.backoff import Backoff, until
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.errors import RemoteError
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.security import HEADER, PLAIN, Identity, read_token
from mrlm_pl.settings import Settings, between, check_address

logger = logging.getLogger(__name__)

T = TypeVar("T")
LARGEST_MESSAGE_MB = 2047
RECONNECT_SECONDS = 1.5
"""Seconds without a connection after which a server, and its sessions, count as gone."""

CONTROLLER_SECONDS = 20.0
"""The same for a controller, whose sessions live on its workers while it restarts."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
GOODBYE_SECONDS = 2.0
_REFUSAL = "mrlm-refusal"
"""Metadata that tells the answer of a service from a status of the network."""

_TOO_LARGE = "larger than max"
"""Words of gRPC that tell a message above the limit from other exhausted resources, such as a proxy's quota."""

REFUSAL_BYTES = 2000
"""Longest text of a refusal; gRPC triples it by its encoding, and drops trailers above 8 KiB."""

_WANTS_TLS, _HUNG_UP = "the server wants TLS", "failed to connect to all addresses; last error: UNAVAILABLE"
"""Words of ours, and of gRPC: the server took the connection and closed it, as one that goes down does too."""

_WRONG_KEYS = {
    "CERTIFICATE_VERIFY_FAILED": (
        "renew the server's certificate, or give the authority that signed it as tls_authority"
    ),
    "Failed to create security handshaker": (
        "a file of tls_... is damaged, or tls_key is not the key of tls_certificate: give whole files, and its own key"
    ),
    "WRONG_VERSION_NUMBER": "the server has no TLS: leave tls_... out, or give it tls_certificate and tls_key",
    _WANTS_TLS: (
        "give tls_authority, and tls_certificate and tls_key where it wants those of clients (for served_by as "
        "MRLM_TLS_AUTHORITY, ...)"
    ),
}
"""Words for faults of TLS that a repetition does not change, with their remedies."""

_REMEDIES = _WRONG_KEYS | {
    "Failed parsing HTTP/2": "another program listens there: check the address",
    "Method not found": "start the server with --environments, --policies or --verifier, and in the client's version",
    _HUNG_UP: "if the server wants certificates of clients, give tls_certificate and tls_key",
}

FINAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
"""Statuses that a repetition does not change."""


class StatusError(Exception):
    """A status instead of a reply: the network failed, or a service rejected the request."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code, self.text = code, text

    @property
    def too_large(self) -> bool:
        """True if a message is larger than either end allows."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in self.text

    @property
    def lasting(self) -> bool:
        """True if no repetition changes it: token, certificate or protocol are wrong."""
        return self.code in FINAL or any(word in self.text for word in _WRONG_KEYS)

    @property
    def transient(self) -> bool:
        """True if the network failed in a way that a repetition may change."""
        return not self.lasting and not self.too_large


class RefusalError(StatusError):
    """A service rejected the request."""

    too_large = transient = False


async def refuse(context: Any, code: grpc.StatusCode, text: str) -> Any:
    """End a call with a status of the service, which clients tell from one of the network.

    gRPC sends neither lone surrogates nor long texts, so the former are replaced and the latter cut.
    """
    sent = text.encode("utf-8", "replace")[:REFUSAL_BYTES].decode("utf-8", "ignore")
    await context.abort(code, sent, ((_REFUSAL, "1"),))


@dataclass(frozen=True)
class Address(Settings):
    """A server's address and the terms of a connection to it.

    Args:
        target: ``HOST:PORT`` of the server.
        token_file: file with the token; None takes ``MRLM_TOKEN``.
        identity: keys for TLS.
        message_mb: maximum size of a message, in MiB.

    Raises:
        ConfigurationError: the target is not ``HOST:PORT``, or the size is out of range.
    """

    target: str
    token_file: str | None = None
    identity: Identity = PLAIN
    message_mb: Annotated[int, between(1, LARGEST_MESSAGE_MB)] = 16

    def __post_init__(self) -> None:
        check_address(self.target)


class Connection:
    """A connection; all methods run on its event loop.

    Args:
        address: address of the server.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.unanswered = 0
        self.leases: dict[str, float] = {}
        self.patience = RECONNECT_SECONDS
        self._keeper: asyncio.Task[None] | None = None
        self._shorter = asyncio.Event()
        self._closed = ""
        options = [
            ("grpc.max_receive_message_length", address.message_mb << 20),
            ("grpc.max_send_message_length", address.message_mb << 20),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 15_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 1000),  # the time for a connection: three round trips with TLS
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        token = read_token(address.token_file)
        self._metadata = ((HEADER, f"Bearer {token}"),) if token else ()
        self._channel = grpc.aio.secure_channel(address.target, address.identity.for_client(), options=options)
        self._stubs: dict[Callable[[Any], Any], Any] = {}

    async def call(
        self,
        method: str,
        request: Any,
        timeout: float,
        service: Callable[[Any], Any] = environment_pb2_grpc.EnvironmentServiceStub,
        patience: float | None = None,
    ) -> Any:
        """Return the reply to a request.

        Args:
            method: method of the service.
            request: message of the request.
            timeout: seconds for the reply, repetitions included.
            service: class of the service's stubs.
            patience: seconds for which a request is repeated while the server cannot be reached; None: those of this
                connection.

        Raises:
            StatusError: the server rejected the call, is gone, or did not answer in time, or a message is larger than
                either end allows.
        """
        if service not in self._stubs:
            self._stubs[service] = service(self._channel)
        call = getattr(self._stubs[service], method)
        loop = asyncio.get_running_loop()
        patience = self.patience if patience is None else patience
        deadline = loop.time() + timeout
        backoff: Backoff | None = None
        while True:
            if self._closed:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, f"{self.address.target}: {self._closed}")
            started = loop.time()
            self.unanswered += 1
            try:
                return await call(request, timeout=max(deadline - started, 0.001), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                problem = await self._status_error(error, timeout)
                if not problem.transient or problem.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise problem from error
            except DecodeError as error:
                text = f"{self.address.target} answers with messages of another protocol: {error}"
                problem = StatusError(grpc.StatusCode.INTERNAL, text)
            except asyncio.CancelledError:
                if not self._closed:
                    raise
                continue  # the connection was closed, which ends its calls
            finally:
                self.unanswered -= 1
            if backoff is None or loop.time() - started > patience:  # it was connected in between
                backoff = Backoff(patience, FIRST_PAUSE, LONGEST_PAUSE)
            if not await backoff.pause():
                raise problem

    async def _status_error(self, error: grpc.aio.AioRpcError, timeout: float) -> StatusError:
        code, text = error.code(), f"{self.address.target}: {error.details()}"
        if any(key == _REFUSAL for key, _ in error.trailing_metadata() or ()):
            return RefusalError(code, error.details() or "")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
            text += "; make the message smaller, or raise message_mb on both sides"
        if _HUNG_UP in text and self.address.identity.empty and await self._answers_tls():
            text += f"; {_WANTS_TLS}"
        text += next((f"; {remedy}" for words, remedy in _REMEDIES.items() if words in text), "")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return StatusError(code, f"{self.address.target} did not answer within {timeout:g} s")
        return StatusError(code, text)

    async def _answers_tls(self) -> bool:
        host, _, port = self.address.target.rpartition(":")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            opened = asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            _, writer = await asyncio.wait_for(opened, RECONNECT_SECONDS)
        except OSError:
            return False
        writer.close()
        return True

    async def join(self, reports: AsyncIterator[pb.WorkerReport]) -> AsyncIterator[pb.WorkerOrder]:
        """Yield a controller's answers to a worker's reports.

        Raises:
            StatusError: the controller rejected the worker, or is gone.
        """
        controller = environment_pb2_grpc.ControllerServiceStub(self._channel)
        try:
            async for order in controller.Join(reports, metadata=self._metadata):
                yield order
        except grpc.aio.AioRpcError as error:
            raise await self._status_error(error, math.inf) from error

    def hold(self, session: str, lease_seconds: float) -> None:
        """Keep a session's lease alive until it is released."""
        if lease_seconds < min(self.leases.values(), default=math.inf):
            self._shorter.set()
        self.leases[session] = lease_seconds
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.ensure_future(self._keep())

    async def close(self, reason: str = "the connection was closed") -> None:
        """End the connection; unanswered calls fail as UNAVAILABLE for this reason."""
        self._closed = reason
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        await self._channel.close()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while self.leases and not self._closed:
            self._shorter.clear()
            pause = renewed + max(min(self.leases.values()) / 3, 0.05) - loop.time()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._shorter.wait(), pause)
                continue
            renewed = loop.time()
            try:
                reply = await self.call("KeepAlive", pb.KeepAliveRequest(sessions=self.leases), 10.0)
            except StatusError:
                continue  # the next step of the session raises
            except Exception:  # all sessions depend on this task
                logger.exception("leases at %s could not be renewed; retrying", self.address.target)
                continue
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
"""In a forked process it is that of the parent: freeing it would end this process."""


def _shared_process() -> _Process:
    global _process
    with _lock:
        if _process is None:
            _process = _Process()
        if _process.id != os.getpid():  # gRPC would wait for a thread that only the parent has
            raise RemoteError(
                "this process was forked after its parent had called a server, and gRPC cannot work in it; fork before "
                "the first call, or start it with `spawn`"
            )
        return _process


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the event loop of all connections.

    Raises:
        RemoteError: this process was forked after its parent had called this.
    """
    try:
        return _shared_process().loop.submit(coroutine)
    except RemoteError:
        coroutine.close()
        raise


async def connection(address: Address) -> Connection:
    """Return the connection to an address; to be awaited on the loop of :func:`submit`."""
    connections = _shared_process().connections
    if address not in connections:
        connections[address] = Connection(address)
    return connections[address]


@atexit.register
def _say_goodbye() -> None:
    """Close open sessions, so that servers need not wait for their leases."""
    if _process is None or _process.id != os.getpid():
        return
    with suppress(Exception):  # the process ends, and the leases end its sessions
        _process.loop.submit(_close_all(_process)).result(GOODBYE_SECONDS)


async def _close_all(process: _Process) -> None:
    closing = [
        server.call("Close", pb.CloseRequest(session=session), GOODBYE_SECONDS)
        for server in process.connections.values()
        for session in server.leases
    ]
    await asyncio.gather(*closing, return_exceptions=True)
    # Dropped environments close their own sessions.
    await until(lambda: not any(server.unanswered for server in process.connections.values()), GOODBYE_SECONDS)
    for server in process.connections.values():
        await server.close()


def _renew_lock() -> None:
    """Replace the lock in a forked process; a thread that it does not have may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
