"""A server process: the service with its workers, health, reflection and a clean shutdown."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mrlm_pl.concurrency.backoff import until
from mrlm_pl.concurrency.calls import Workers
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import EnvironmentService, Limits
from mrlm_pl.serving.transport import environment_pb2, environment_pb2_grpc
from mrlm_pl.serving.transport.call_check import CallCheck
from mrlm_pl.serving.transport.security import PLAIN, Identity
from mrlm_pl.serving.verifiers import verifier_pb2_grpc
from mrlm_pl.serving.verifiers.service import SERVICE as VERIFIER_SERVICE
from mrlm_pl.serving.verifiers.service import VerifierService
from mrlm_pl.settings import is_loopback

logger = logging.getLogger(__name__)

SERVICE = environment_pb2.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
SWEEP_SECONDS = 0.5
CLOSING_SECONDS = 10.0
CALLS_AT_ONCE = 50_000
"""Calls in flight: more than the default limits of sessions and queue together; clients repeat those beyond."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address, and the clients that it accepts.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        token: token that calls must carry; required beyond this machine.
        identity: keys for TLS.

    Raises:
        ConfigurationError: the server is reachable from other machines and has no token, or there is no such port.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    identity: Identity = PLAIN

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:  # gRPC takes others modulo 65536
            raise ConfigurationError(f"port: there is no port {self.port}; give 1 to 65535, or 0 for a free one")
        if not is_loopback(self.host) and not self.token:
            raise ConfigurationError(
                f"host: {self.host!r} is reachable from other machines, and there is no token; put one into MRLM_TOKEN "
                "or a file named by token_file, or serve on 127.0.0.1"
            )


class EnvironmentServer:
    """Environments behind gRPC. Start, serve and stop it on one event loop.

    Args:
        offer: environments to serve.
        endpoint: address of the server.
        limits: limits of the server.
        threads: number of threads that call environments.
        queue: maximum length of the queue of calls.
        policies: a :class:`~mrlm_pl.serving.policies.service.PolicyService` to serve as well; None has none.
        verifier: a :class:`~mrlm_pl.serving.verifiers.service.VerifierService` to serve as well; None has none.
    """

    def __init__(
        self,
        offer: Offer,
        endpoint: Endpoint = Endpoint(),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        threads: int = 8,
        queue: int = 10_000,
        policies: Any = None,
        verifier: VerifierService | None = None,
    ) -> None:
        self.offer, self.endpoint, self.limits = offer, endpoint, limits
        self.workers = Workers(threads, queue)
        self.service = EnvironmentService(offer, self.workers, limits)
        self.policies, self.verifier = policies, verifier
        self.port = 0
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; ``port`` is then the port.

        Raises:
            ConfigurationError: the port is taken, or a key cannot be read.
        """
        size = self.limits.message_mb << 20
        server = grpc.aio.server(
            interceptors=[CallCheck(self.endpoint.token or None)],
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ],
            maximum_concurrent_rpcs=CALLS_AT_ONCE,
        )
        self.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host = self.endpoint.host
        if host.count(":") > 1 and host[0] != "[":
            host = f"[{host}]"
        address, credentials = f"{host}:{self.endpoint.port}", self.endpoint.identity.for_server()
        try:
            self.port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            hint = "is it taken, or is tls_key not the key of tls_certificate?"
            if self.endpoint.identity.empty:
                hint = "is it taken? Use another"
            raise ConfigurationError(f"port: cannot listen on {address} ({error}); {hint}") from error
        await server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        self._sweeper = asyncio.ensure_future(self._sweep())

    def register(self, server: grpc.aio.Server) -> None:
        """Add the services."""
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self.service, server)
        if self.policies is not None:
            environment_pb2_grpc.add_PolicyServiceServicer_to_server(self.policies, server)
        if self.verifier is not None:
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self.verifier, server)

    @property
    def _names(self) -> tuple[str, ...]:
        return (SERVICE,) if self.verifier is None else (SERVICE, VERIFIER_SERVICE)

    async def serve(self) -> None:
        """Wait until it is stopped."""
        assert self._server is not None, "start it first"
        await self._server.wait_for_termination()

    async def drain(self, grace_seconds: float) -> None:
        """Reject new sessions and texts, wait for the current ones for at most ``grace_seconds``, then stop."""
        self.service.draining = True
        if self.verifier is not None:
            self.verifier.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await until(
            lambda: not (self.service.sessions or self.service.opening or (self.verifier and self.verifier.busy)),
            grace_seconds,
        )
        await self.stop()

    async def stop(self) -> None:
        """End all sessions and close the port; may be called twice."""
        if self._server is None or self._sweeper is None:
            return
        server, self._server = self._server, None
        for session in list(self.service.sessions.values()):
            self.service.end(session, "the server was stopped")
        self._sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._sweeper
        await server.stop(1.0)
        if self.verifier is not None:
            self.verifier.close()
        await self.service.closed(CLOSING_SECONDS)
        self.workers.close()
        self.offer.close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await asyncio.sleep(SWEEP_SECONDS)
            delay = loop.time() - started - SWEEP_SECONDS
            if delay > SWEEP_SECONDS:  # the process was suspended, and calls that renew leases are unread
                for session in self.service.sessions.values():
                    session.touched += delay
            await self.service.expire()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)
