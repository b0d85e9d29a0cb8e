"""A controller: workers join, and sessions are placed on the least loaded one.

It has no state of its own: a session's id begins with the id of its worker, and workers report themselves as soon as
they can reach it. So it can be restarted while sessions are live.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from mrlm_pl.concurrency.backoff import Backoff, until
from mrlm_pl.concurrency.calls import Workers
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import Code, EnvironmentService, Limits
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.connection import Address, Connection, RefusalError, StatusError, refuse
from mrlm_pl.serving.transport.security import Identity

logger = logging.getLogger(__name__)

SILENT_SECONDS = 3.0
"""Seconds without a report after which a worker gets no new sessions."""

SEPARATOR = "."
FORWARD_SECONDS = 300.0
"""Maximum duration of a forwarded call in seconds, unless the controller's ``step_seconds`` is larger."""

REJOIN_SECONDS = 10.0
"""Seconds that a call waits for the worker of its session, after the start of this controller."""


@dataclass(eq=False)
class Worker:
    """A worker that has joined.

    Args:
        report: latest report of the worker.
        connection: connection to the worker.
        heard: time of the latest report.
        placed: number of sessions placed on it since that report.
        opening: number of sessions that are being opened on it, which a report may not include yet.
    """

    report: pb.WorkerReport
    connection: Connection
    heard: float = field(default_factory=time.monotonic)
    placed: int = 0
    opening: int = 0

    @property
    def load(self) -> float:
        """Fraction of its capacity in use."""
        return (self.report.sessions + self.placed + self.opening) / max(self.report.capacity, 1)

    def hosts(self, environment: str) -> bool:
        """Return whether it has an environment."""
        silent = time.monotonic() - self.heard
        return silent < SILENT_SECONDS and environment in {description.name for description in self.report.environments}

    def offers(self, environment: str) -> bool:
        """Return whether it takes a new session of an environment."""
        return self.hosts(environment) and not self.report.draining and self.load < 1


class ControllerService(EnvironmentService, environment_pb2_grpc.ControllerServiceServicer):
    """The service of environments over workers, and the service that workers join.

    Args:
        limits: limits of the controller.
        token_file: file with the token that workers require.
        identity: keys for TLS to the workers.
    """

    def __init__(self, limits: Limits, token_file: str | None, identity: Identity) -> None:
        super().__init__(Offer({}, 0, limits.step_seconds), Workers(1, 1), limits)
        self.live: dict[str, Worker] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._started = time.monotonic()
        self._forward_seconds = max(FORWARD_SECONDS, limits.step_seconds)
        self._address_template = Address("worker:1", token_file, identity, limits.message_mb)

    async def open(self, request: pb.OpenRequest) -> pb.OpenReply:
        """Return a session on the least loaded worker that takes it."""
        if self.draining:
            raise RefusalError(Code.UNAVAILABLE, "the controller is going down and opens no session")
        await self._until(lambda: any(worker.offers(request.environment) for worker in self.live.values()))
        problem = StatusError(Code.UNAVAILABLE, f"no worker takes a session of {request.environment[:100]!r} now")
        for worker in sorted(self.live.values(), key=lambda worker: worker.load):
            if not worker.offers(request.environment):
                continue
            worker.opening += 1
            try:
                reply: pb.OpenReply = await worker.connection.call("Open", request, self._forward_seconds)
            except StatusError as error:
                if error.too_large or error.code not in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED):
                    raise
                problem = error
                continue
            finally:
                worker.opening -= 1
            worker.placed += 1
            reply.direct = worker.report.address
            return reply
        raise problem

    async def step(self, request: pb.StepRequest) -> pb.StepReply:
        """Forward a step."""
        return await self._forward("Step", request)

    async def close(self, request: pb.CloseRequest) -> pb.CloseReply:
        """Forward a close."""
        return await self._forward("Close", request)

    async def keep_alive(self, request: pb.KeepAliveRequest) -> pb.KeepAliveReply:
        """Forward a renewal of leases to each worker; one that is silent does not delay the others'."""
        by_worker = grouped((session.partition(SEPARATOR)[0], session) for session in request.sessions)
        unknown = await asyncio.gather(*(self._renew(name, sessions) for name, sessions in by_worker.items()))
        return pb.KeepAliveReply(unknown=itertools.chain(*unknown))

    async def _renew(self, name: str, sessions: Sequence[str]) -> Sequence[str]:
        """Renew leases at a worker; return the sessions that are gone."""
        try:
            worker = await self._worker(name)
            request = pb.KeepAliveRequest(sessions=sessions)
            reply = await worker.connection.call("KeepAlive", request, self._forward_seconds)
        except StatusError as error:
            # A worker that is only out of reach for now keeps its sessions until their leases end.
            return [] if error.transient else sessions
        return list(reply.unknown)

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerReport], context: Any
    ) -> AsyncIterator[pb.WorkerOrder]:
        """Answer a worker's reports; the worker is gone when they end.

        Reject a worker whose id another live worker has: that worker keeps its sessions, and the new one may ask again.
        """
        worker: Worker | None = None
        try:
            async for report in request_iterator:
                if worker is None:
                    live_worker = self.live.get(report.worker)
                    if live_worker is not None and time.monotonic() - live_worker.heard < SILENT_SECONDS:
                        await refuse(context, Code.UNAVAILABLE, f"a worker {report.worker[:40]!r} is live already")
                    worker = Worker(report, Connection(replace(self._address_template, target=report.address)))
                    self.live[report.worker] = worker
                    logger.info("worker %r at %r joined", report.worker, report.address)
                worker.report, worker.heard, worker.placed = report, time.monotonic(), 0
                yield pb.WorkerOrder(drain=self.draining)
        finally:
            if worker is not None:
                if self.live.get(worker.report.worker) is worker:
                    del self.live[worker.report.worker]
                logger.info("worker %r at %r is gone", worker.report.worker, worker.report.address)
                # Not awaited here: this stream may be cancelled, and the connection must be closed.
                text = f"the worker at {worker.report.address} is gone"
                closing = asyncio.ensure_future(worker.connection.close(text))
                self._leaving.add(closing)
                closing.add_done_callback(self._leaving.discard)

    async def leave(self) -> None:
        """Close the connections to all workers."""
        workers, self.live = list(self.live.values()), {}
        await asyncio.gather(*self._leaving, *(worker.connection.close() for worker in workers))

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Any) -> pb.ListWorkersReply:  # noqa: N802
        """Return the workers and the seconds since the last report of each."""
        now = time.monotonic()
        workers = [
            pb.WorkerDescription(report=worker.report, silent_seconds=now - worker.heard)
            for worker in self.live.values()
        ]
        return pb.ListWorkersReply(workers=workers)

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """Return the environments of all workers, or one worker's description of an environment."""
        if not request.environment:
            by_name = {
                description.name: description
                for worker in self.live.values()
                for description in worker.report.environments
            }
            return pb.DescribeReply(environments=[by_name[name] for name in sorted(by_name)])
        return await self._ask_any(request.environment, "Describe", request)

    async def _tasks(self, request: pb.TasksRequest) -> pb.TasksReply:
        return await self._ask_any(request.environment, "GetTasks", request)

    async def _list(self, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
        sessions: list[pb.SessionDescription] = []
        total = 0
        for worker in list(self.live.values()):
            with suppress(StatusError):  # it is gone
                reply = await worker.connection.call("ListSessions", request, 10.0)
                sessions += reply.sessions
                total += reply.total
        return pb.ListSessionsReply(sessions=sessions[: request.limit] if request.limit else sessions, total=total)

    async def _ask_any(self, environment: str, method: str, request: Any) -> Any:
        await self._until(lambda: any(worker.hosts(environment) for worker in self.live.values()))
        for worker in self.live.values():
            if worker.hosts(environment):
                return await worker.connection.call(method, request, 60.0)
        raise RefusalError(Code.NOT_FOUND, f"no worker has an environment {environment[:100]!r}")

    async def _forward(self, method: str, request: Any) -> Any:
        worker = await self._worker(request.session.partition(SEPARATOR)[0])
        return await worker.connection.call(method, request, self._forward_seconds)

    async def _worker(self, name: str) -> Worker:
        await self._until(lambda: name in self.live)
        if name not in self.live:
            raise RefusalError(Code.UNAVAILABLE, f"the worker {name[:40]!r} of the session is gone")
        return self.live[name]

    async def _until(self, ready: Any) -> None:
        """Wait for workers to join again, shortly after this controller was started."""
        await until(ready, self._started + REJOIN_SECONDS - time.monotonic())


class ControllerServer(EnvironmentServer):
    """A server with no environments of its own.

    Args:
        endpoint: address to listen on.
        limits: limits of the controller.
        token_file: file with the token that workers require.
    """

    def __init__(self, endpoint: Endpoint, limits: Limits, token_file: str | None = None) -> None:
        super().__init__(Offer({}, 0, limits.step_seconds), endpoint, limits, threads=1, queue=1)
        self.service: ControllerService = ControllerService(limits, token_file, endpoint.identity)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the services, that of workers among them."""
        super().register(server)
        environment_pb2_grpc.add_ControllerServiceServicer_to_server(self.service, server)

    async def stop(self) -> None:
        """Close the port and the connections to workers; may be called twice."""
        await super().stop()
        await self.service.leave()


class Membership:
    """A worker's membership at a controller, on the server's event loop.

    Args:
        server: the worker's server, started.
        controller: address of the controller.
        address: address at which clients can reach the worker.
    """

    REPORT_SECONDS = 0.5

    def __init__(self, server: EnvironmentServer, controller: Address, address: str) -> None:
        self.server, self.address = server, address
        self._connection = Connection(controller)
        self._descriptions: Sequence[pb.EnvironmentDescription] = ()

    async def run(self) -> None:
        """Join, report, and join again when the connection breaks; leave when cancelled.

        Raises:
            ConfigurationError: the controller rejects this worker, and has never admitted it.
        """
        self._descriptions = (await self.server.service.describe(pb.DescribeRequest())).environments
        try:
            await self._stay()
        finally:
            await self._connection.close()

    def report(self) -> pb.WorkerReport:
        """Return the worker's current state."""
        service = self.server.service
        return pb.WorkerReport(
            worker=service.sessions.prefix.removesuffix(SEPARATOR),
            address=self.address,
            environments=self._descriptions,
            sessions=len(service.sessions),
            capacity=service.limits.sessions,
            waiting=self.server.workers.waiting,
            draining=service.draining,
        )

    async def _stay(self) -> None:
        backoff, reported, joined = Backoff(longest=1.0), "", False
        while True:
            try:
                async for order in self._connection.join(self._reports()):
                    backoff, reported, joined = Backoff(longest=1.0), "", True
                    if order.drain:
                        logger.info("the controller is going down")
            except StatusError as error:
                target = self._connection.address.target
                problem = error.text.removeprefix(f"{target}: ") or error.code.name
                if error.lasting and not joined:
                    speaks_protocol = error.code is not Code.UNIMPLEMENTED
                    reason = problem if speaks_protocol else "it is not a controller, which `--controller` makes of it"
                    raise ConfigurationError(f"join: {target} does not take this worker: {reason}") from error
                if problem != reported:
                    logger.warning("the controller at %s cannot be reached; retrying: %s", target, problem)
                    reported = problem
            await backoff.pause()

    async def _reports(self) -> AsyncIterator[pb.WorkerReport]:
        while True:
            yield self.report()
            try:
                await asyncio.sleep(self.REPORT_SECONDS)
            except asyncio.CancelledError:
                return  # the stream has ended; see Connection
