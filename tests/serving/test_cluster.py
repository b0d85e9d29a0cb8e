"""A controller over workers that dial in: placement, the two ways of the data, restarts and losses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from grpc.aio import Metadata
from mrlm_environments.games.coordination import CoordinationGame

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import Message
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving import cluster as cluster_module
from mrlm_pl.serving.cluster import SEPARATOR, ControllerServer, Membership
from mrlm_pl.serving.environments import client
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import Limits, refusal_of
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport import addresses
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.codec import to_json
from mrlm_pl.serving.transport.connection import Address, Connection, RefusalError, StatusError
from mrlm_pl.serving.transport.environment_pb2_grpc import EnvironmentServiceStub

Code = grpc.StatusCode
BOTH = {"row": Message("assistant", "C"), "column": Message("assistant", "C")}


class Cluster:
    """A controller and its workers, on one event loop."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        self.loop = EventLoopThread()
        self.controller = ControllerServer(Endpoint(), limits)
        self.run(self.controller.start())
        self.port = self.controller.port
        self.workers: list[tuple[EnvironmentServer, Future[None]]] = []

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, coroutine: Any) -> Any:
        return self.loop.submit(coroutine).result(100)

    def add(self, sessions: int = 100, advertise: str | None = None) -> EnvironmentServer:
        """A worker that has joined."""
        offer = Offer({"coordination": lambda settings: CoordinationGame()}, 0, 10.0)
        worker = EnvironmentServer(offer, Endpoint(), Limits(sessions=sessions))
        worker.service.sessions.prefix = f"worker{len(self.workers)}{SEPARATOR}"
        self.run(worker.start())

        async def join() -> None:
            await Membership(worker, Address(self.target), advertise or f"127.0.0.1:{worker.port}").run()

        self.workers.append((worker, self.loop.submit(join())))
        eventually(lambda: len(self.controller.service.live) == len(self.workers))
        return worker

    def restart(self) -> None:
        """Stop the controller and start another on its port."""
        self.run(self.controller.stop())
        self.controller = ControllerServer(Endpoint(port=self.port), Limits())
        self.run(self.controller.start())

    def stop(self) -> None:
        for worker, joining in self.workers:
            joining.cancel()
            self.run(worker.stop())
        self.run(self.controller.stop())
        self.loop.close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    monkeypatch.setattr(client, "_reached", {})
    made = Cluster()
    yield made
    made.stop()


def eventually(holds: Callable[[], bool], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def begun(cluster: Cluster, count: int) -> list[RemoteEnvironment]:
    """So many episodes under way."""
    environment = RemoteEnvironment(cluster.target, "coordination", open_seconds=60.0)
    tasks = environment.tasks("train")
    copies = [environment.copy() for _ in range(count)]

    async def reset() -> None:
        await asyncio.gather(*(copy.reset(tasks[index]) for index, copy in enumerate(copies)))

    asyncio.run(reset())
    return copies


@pytest.mark.parametrize("same_address", [False, True])
def test_a_worker_of_an_id_that_is_live_does_not_take_its_place(cluster: Cluster, same_address: bool) -> None:
    worker = cluster.add()
    episodes = begun(cluster, 3)
    (genuine,) = cluster.controller.service.live.values()
    address = genuine.report.address if same_address else "127.0.0.1:9"

    async def join() -> Any:
        connection = Connection(Address(cluster.target))

        async def reports() -> Any:
            yield pb.WorkerReport(worker="worker0", address=address, capacity=10**6)
            await asyncio.sleep(1)

        try:
            return [order async for order in connection.join(reports())]
        except StatusError as error:
            return error
        finally:
            await connection.close()

    refused = cluster.run(join())
    assert (refused.code, refused.lasting) == (grpc.StatusCode.UNAVAILABLE, False), "it may ask again"
    assert "'worker0' is live already" in refused.text
    assert list(cluster.controller.service.live.values()) == [genuine]
    episodes += begun(cluster, 2)
    assert len(worker.service.sessions) == len(episodes) == 5


@pytest.fixture
def silent_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers report once: a report sets back the count of the sessions that were placed since the one before."""
    monkeypatch.setattr(Membership, "REPORT_SECONDS", 600.0)
    monkeypatch.setattr("mrlm_pl.serving.cluster.SILENT_SECONDS", 600.0)


@pytest.mark.usefixtures("silent_workers")
def test_sessions_are_spread_evenly_and_served_by_their_workers(cluster: Cluster) -> None:
    workers = [cluster.add(), cluster.add()]
    episodes = begun(cluster, 20)
    assert [len(worker.service.sessions) for worker in workers] == [10, 10]
    places = Counter(episode._address.target for episode in episodes if episode._address)
    assert places == {f"127.0.0.1:{worker.port}": 10 for worker in workers}, "clients reach them directly"
    assert all(asyncio.run(episode.step(BOTH)).rewards == {"row": 1.0, "column": 1.0} for episode in episodes)
    for episode in episodes:
        episode.close()
    eventually(lambda: all(len(worker.service.sessions) == 0 for worker in workers))


@pytest.mark.usefixtures("silent_workers")
def test_the_less_loaded_worker_is_taken_by_its_share(cluster: Cluster) -> None:
    small, large = cluster.add(sessions=10), cluster.add(sessions=30)
    episodes = begun(cluster, 20)
    assert (len(small.service.sessions), len(large.service.sessions)) == (5, 15)
    assert len(episodes) == 20


def test_where_workers_cannot_be_reached_the_controller_forwards(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REACH_SECONDS", 0.3)

    async def unreachable(worker: Address, session: str) -> bool:
        return False

    monkeypatch.setattr(client, "_reaches", unreachable)
    worker = cluster.add()
    (episode,) = begun(cluster, 1)
    assert episode._address == Address(cluster.target)
    assert asyncio.run(episode.step(BOTH)).rewards == {"row": 1.0, "column": 1.0}
    episode.close()
    eventually(lambda: len(worker.service.sessions) == 0)


def test_a_worker_that_can_be_reached_no_more_is_reached_through_the_controller(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cluster.add()
    (lost,) = begun(cluster, 1)
    assert lost._address.target == f"127.0.0.1:{worker.port}"
    connection = client.connection

    async def cut(address: Address) -> Any:
        """The way from this client to the worker is closed; the controller's is open."""
        silent = StatusError(Code.UNAVAILABLE, "connection refused")
        closed = SimpleNamespace(call=AsyncMock(side_effect=silent), leases={}, hold=lambda *_: None)
        return closed if address == lost._address else await connection(address)

    monkeypatch.setattr(client, "connection", cut)
    with pytest.raises(RemoteError, match="connection refused"):
        asyncio.run(lost.step(BOTH))
    (episode,) = begun(cluster, 1)
    assert episode._address.target == cluster.target
    assert asyncio.run(episode.step(BOTH)).done
    episode.close()


@pytest.mark.long
def test_a_controller_that_is_started_again_finds_its_workers_and_their_sessions(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(worker: Address, session: str) -> bool:
        return False

    monkeypatch.setattr(client, "_reaches", unreachable)
    worker = cluster.add()
    episodes = begun(cluster, 100)
    cluster.restart()
    assert all(asyncio.run(episode.step(BOTH)).done for episode in episodes)
    assert worker.service.sessions.opened_total == 100
    for episode in episodes:
        episode.close()
    eventually(lambda: len(worker.service.sessions) == 0)
    assert len(begun(cluster, 1)) == 1, "and it places new ones"


def test_a_worker_that_leaves_gets_no_more_sessions(cluster: Cluster) -> None:
    first, second = cluster.add(), cluster.add()
    worker, joining = cluster.workers.pop(0)
    joining.cancel()
    cluster.run(worker.stop())
    eventually(lambda: len(cluster.controller.service.live) == 1)
    episodes = begun(cluster, 5)
    assert len(episodes) == 5
    assert (len(first.service.sessions), len(second.service.sessions)) == (0, 5)
    eventually(lambda: not cluster.controller.service._leaving)


def test_forwarded_steps_may_take_as_long_as_the_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreached(*arguments: Any) -> bool:
        return False  # so that steps are forwarded

    step = CoordinationGame.step
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    monkeypatch.setattr(client, "_reaches", unreached)
    monkeypatch.setattr(cluster_module, "FORWARD_SECONDS", 0.3)
    monkeypatch.setattr(CoordinationGame, "quick", False)
    monkeypatch.setattr(CoordinationGame, "step", lambda *given: time.sleep(0.9) or step(*given))
    cluster = Cluster(Limits(step_seconds=60.0))
    try:
        cluster.add()
        (episode,) = begun(cluster, 1)
        assert asyncio.run(episode.step(BOTH)).done
    finally:
        cluster.stop()


def test_a_silent_worker_does_not_delay_the_renewal_at_others(cluster: Cluster) -> None:
    silent, other = cluster.add(), cluster.add()
    episodes = begun(cluster, 2)
    sessions = [session for worker in (silent, other) for session in worker.service.sessions.values()]
    before = [session.touched for session in sessions]
    assert len(sessions) == len(episodes) == 2

    async def never(*arguments: Any) -> Any:
        await asyncio.sleep(600)

    cluster.controller.service.live["worker0"].connection.call = never  # type: ignore[method-assign]
    request = pb.KeepAliveRequest(sessions=[session.id for session in sessions])

    async def ask() -> Any:
        async with grpc.aio.insecure_channel(cluster.target) as channel:
            return await EnvironmentServiceStub(channel).KeepAlive(request, timeout=100.0)

    asked = cluster.loop.submit(ask())
    eventually(lambda: sessions[1].touched > before[1], 60.0)
    assert (sessions[0].touched, asked.done()) == (before[0], False)
    asked.cancel()


def test_a_worker_that_is_gone_is_not_asked_for_ever(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_gone", {})
    cluster.add()
    (episode,) = begun(cluster, 1)
    worker, joining = cluster.workers.pop(0)
    joining.cancel()
    cluster.run(worker.stop())
    with pytest.raises(RemoteError):
        asyncio.run(episode.step(BOTH))
    assert addresses._gone == {}


@pytest.mark.usefixtures("silent_workers")
def test_a_failed_opening_does_not_count_as_load(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = cluster.add()
    (joined,) = cluster.controller.service.live.values()
    request = pb.OpenRequest(environment="coordination", task=to_json(CoordinationGame().tasks("train")[0]))
    controller = cluster.controller.service
    for fault, code in (
        (StatusError(Code.RESOURCE_EXHAUSTED, "quota exceeded"), Code.RESOURCE_EXHAUSTED),
        (StatusError(Code.RESOURCE_EXHAUSTED, "larger than max (5 vs. 4)"), Code.INVALID_ARGUMENT),
        (RefusalError(Code.ABORTED, "OSError: away"), Code.ABORTED),
        (StatusError(Code.UNAVAILABLE, "away"), Code.UNAVAILABLE),
    ):

        async def failing(*arguments: Any, fault: StatusError = fault) -> Any:
            raise fault

        with monkeypatch.context() as patch:
            patch.setattr(joined.connection, "call", failing)
            with pytest.raises(StatusError) as raised:
                cluster.run(controller.open(request))
        assert refusal_of(raised.value).code is code
        assert (joined.placed, joined.opening) == (0, 0)
    with monkeypatch.context() as patch:

        async def cancelled(*arguments: Any) -> Any:
            raise asyncio.CancelledError

        patch.setattr(joined.connection, "call", cancelled)
        with pytest.raises(CancelledError):
            cluster.run(controller.open(request))
        assert (joined.placed, joined.opening) == (0, 0)
    cluster.run(controller.open(request))
    assert (joined.placed, len(worker.service.sessions)) == (1, 1)


def test_a_report_leaves_the_sessions_that_are_being_opened_counted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(sessions=10)
    (joined,) = cluster.controller.service.live.values()
    request = pb.OpenRequest(environment="coordination", task=to_json(CoordinationGame().tasks("train")[0]))
    ends, call = asyncio.Event(), joined.connection.call

    async def waiting(*arguments: Any) -> Any:
        await ends.wait()
        return await call(*arguments)

    monkeypatch.setattr(joined.connection, "call", waiting)
    opened = cluster.loop.submit(cluster.controller.service.open(request))
    eventually(lambda: joined.opening == 1)
    heard = joined.heard
    eventually(lambda: joined.heard > heard)
    assert joined.load == 1 / 10
    cluster.loop.submit(_set(ends)).result(100)
    opened.result(100)
    assert joined.opening == 0


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.parametrize(
    ("fault", "unknown"),
    [
        (StatusError(Code.UNAVAILABLE, "away"), []),
        (StatusError(Code.UNKNOWN, "Stream removed"), []),
        (RefusalError(Code.NOT_FOUND, "no such session"), ["worker0/a"]),
    ],
)
def test_a_renewal_that_does_not_reach_a_worker_ends_no_lease(
    fault: StatusError, unknown: list[str], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add()
    (joined,) = cluster.controller.service.live.values()

    async def failing(*arguments: Any) -> Any:
        raise fault

    monkeypatch.setattr(joined.connection, "call", failing)
    request = pb.KeepAliveRequest(sessions=[f"worker0{SEPARATOR}a"])
    reply = cluster.run(cluster.controller.service.keep_alive(request))
    assert [session.replace(SEPARATOR, "/") for session in reply.unknown] == unknown


def test_sessions_are_listed_although_a_worker_does_not_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add()
    worker = cluster.add(sessions=1)
    episodes = begun(cluster, 2)
    broken = cluster.controller.service.live["worker0"]

    async def exhausted(*arguments: Any, **options: Any) -> Any:
        raise grpc.aio.AioRpcError(Code.RESOURCE_EXHAUSTED, Metadata(), Metadata(), "quota exceeded")

    monkeypatch.setitem(broken.connection._stubs, EnvironmentServiceStub, SimpleNamespace(ListSessions=exhausted))
    reply = cluster.run(cluster.controller.service._list(pb.ListSessionsRequest()))
    assert len(reply.sessions) == len(worker.service.sessions) == 1
    for episode in episodes:
        episode.close()


def test_malformed_reports_are_refused(cluster: Cluster) -> None:
    cluster.add()
    with grpc.insecure_channel(cluster.target) as channel:
        join = channel.stream_stream("/mrlm.remote.v2.ControllerService/Join")
        good = pb.WorkerReport(worker="other", address="127.0.0.1:9").SerializeToString()
        for reports, orders in (([b"\x0a\xff\x01"], 0), ([good, b"\x0a\x02\xff\xfe"], 1)):
            answers = join(iter(reports), timeout=100)
            for _ in range(orders):
                assert next(answers) == pb.WorkerOrder(drain=False).SerializeToString()
            with pytest.raises(grpc.RpcError) as error:
                next(answers)
            assert error.value.code() is Code.INVALID_ARGUMENT
            assert "malformed" in error.value.details()
    eventually(lambda: list(cluster.controller.service.live) == ["worker0"])
    assert len(begun(cluster, 1)) == 1


def test_a_worker_that_goes_down_is_passed_over(cluster: Cluster) -> None:
    first, second = cluster.add(), cluster.add()
    first.service.draining = True
    episodes = begun(cluster, 4)
    assert len(episodes) == 4
    assert (len(first.service.sessions), len(second.service.sessions)) == (0, 4)


def test_what_is_asked_of_a_controller(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.add()
    episodes = begun(cluster, 3)
    monkeypatch.setattr("mrlm_pl.serving.cluster.REJOIN_SECONDS", 0.1)
    assert RemoteEnvironment(cluster.target, "coordination").agents == ("row", "column")
    with pytest.raises(ConfigurationError, match="no worker has an environment 'chess'"):
        _ = RemoteEnvironment(cluster.target, "chess").agents
    with pytest.raises(RemoteError, match="no worker takes a session of 'chess'"):
        asyncio.run(RemoteEnvironment(cluster.target, "chess", open_seconds=0.2).reset(_task(cluster)))
    eventually(lambda: next(iter(cluster.controller.service.live.values())).report.sessions == len(episodes))


def _task(cluster: Cluster) -> Any:
    return RemoteEnvironment(cluster.target, "coordination").tasks("train")[0]
