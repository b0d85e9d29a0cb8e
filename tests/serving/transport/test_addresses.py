"""Several addresses, some of which are gone: what that costs, and how they come back."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.episode import Message
from mrlm_pl.errors import RemoteError
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments import client
from mrlm_pl.serving.transport import addresses
from mrlm_pl.serving.transport.addresses import in_turn, is_gone
from mrlm_pl.serving.transport.connection import Connection
from tests.support.servers.environment_servers import TASK, Served, eventually
from tests.support.servers.ports import free_port, nowhere

Server = Callable[..., Served]


def opened(environment: RemoteEnvironment) -> RemoteEnvironment:
    made: Any = environment.copy()
    asyncio.run(made.reset(TASK))
    return made


def remote(*targets: str, **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment(list(targets), "scripted", **{"open_seconds": 60.0, **options})


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests for a session by address."""
    found, call = Counter[str](), Connection.call

    async def counted(connection: Connection, method: str, *rest: Any, **options: Any) -> Any:
        if method == "Open":  # not a probe of one that is gone
            found[connection.address.target] += 1
        return await call(connection, method, *rest, **options)

    monkeypatch.setattr(Connection, "call", counted)
    return found


def test_an_address_that_is_gone_costs_its_time_once(serve: Server, openings: Counter[str]) -> None:
    served, port = serve(), free_port()
    environment = remote(served.target, f"127.0.0.1:{port}")
    first = [opened(environment) for _ in range(2)]  # one of them asks the dead one, for 1.5 s
    assert is_gone(environment.addresses[1])
    assert not is_gone(environment.addresses[0])
    assert [address.target for address in in_turn(environment.addresses)] == [served.target, f"127.0.0.1:{port}"]
    openings.clear()
    playing = [opened(environment) for _ in range(20)]
    assert openings == {served.target: 20}, "ten of them would wait 1.5 s each"
    assert served.live == 22

    back = serve(port=port)
    eventually(lambda: not is_gone(environment.addresses[1]))
    more = [opened(environment) for _ in range(10)]
    assert 3 <= back.live <= 7, "it takes its share again: half of them, but for one that a busy machine kept waiting"
    for made in [*first, *playing, *more]:
        made.close()


def test_the_clients_of_other_servers_do_not_change_the_rotation() -> None:
    ours, others = remote("ours-1:1", "ours-2:1").addresses, remote("others-1:1", "others-2:1").addresses
    first = []
    for _ in range(6):
        first.append(in_turn(ours)[0])
        in_turn(others)
    assert first[0::2] == [first[0]] * 3
    assert first[1::2] == [first[1]] * 3
    assert first[0] != first[1]


def test_it_is_asked_ever_more_rarely_and_in_the_background(serve: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    (address,) = remote("gone:1").addresses

    async def sleep(seconds: float) -> None:
        if asyncio.current_task() is not addresses._gone.get(address):  # a task of another test
            await asyncio.sleep(seconds)
            return
        pauses.append(seconds)
        if len(pauses) == 8:
            await asyncio.Event().wait()

    class Clock:
        def __getattr__(self, name: str) -> Any:
            return sleep if name == "sleep" else getattr(asyncio, name)

    class Gone:
        async def call(self, method: str, request: Any, timeout: float) -> None:
            raise addresses.StatusError(client.grpc.StatusCode.UNAVAILABLE, "away")

    async def connection(address: Any) -> Gone:
        return Gone()

    monkeypatch.setattr("mrlm_pl.concurrency.backoff.asyncio", Clock())
    monkeypatch.setattr(addresses, "connection", connection)
    client.submit(_noted(address)).result(60)
    eventually(lambda: len(pauses) == 8)
    longest = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert all(most / 2 <= rest <= most for rest, most in zip(pauses, longest, strict=True))
    assert is_gone(address)
    client.submit(_forgotten(address)).result(60)
    assert not is_gone(address)


async def _noted(address: Any) -> None:
    for _ in range(2):
        addresses.Servers([address], "the server", refused).note_gone(address, OSError("away"), 1.0)


def refused(error: Exception, address: Any) -> Exception:
    return error


async def _forgotten(address: Any) -> None:
    addresses.note_back(address)


def test_when_all_are_gone_all_are_tried(serve: Server) -> None:
    ports = [free_port(), free_port()]
    environment = remote(*(f"127.0.0.1:{port}" for port in ports), open_seconds=1.0)
    with pytest.raises(RemoteError, match="no server opened a session within 1 s"):
        opened(environment)
    assert all(is_gone(address) for address in environment.addresses)
    late = serve(port=ports[0])
    made = opened(environment)
    assert late.live == 1, "before a probe has found it"
    assert not is_gone(environment.addresses[0])
    made.close()


def test_a_server_whose_death_a_step_noticed_is_named_and_passed_over(
    serve: Server, openings: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [serve(), serve()]
    environment = remote(*(served.target for served in servers))
    playing = [opened(environment)]
    while playing[-1]._address != environment.addresses[0]:  # a busy server may be passed over for a while
        playing.append(opened(environment))
    lost = playing[-1]
    servers[0].run(servers[0].server.stop())
    with pytest.raises(RemoteError, match="UNAVAILABLE"):
        asyncio.run(lost.step({"agent": Message("assistant", "go")}))  # type: ignore[arg-type]
    openings.clear()
    more = [opened(environment) for _ in range(20)]
    assert openings == {servers[1].target: 20}, "ten of them would wait 1.5 s each"
    name = f"environment 'scripted' at {servers[0].target}"
    assert [message.partition(" (")[0] for message in caplog.messages] == [f"{name} does not answer"]
    assert caplog.messages[0].endswith(f"; asking {servers[1].target}: start it if it is not running")
    serve(port=int(servers[0].target.rpartition(":")[2]))
    eventually(lambda: not is_gone(environment.addresses[0]))
    more += [opened(environment) for _ in range(2)]
    assert caplog.messages[1:] == [f"{name} answers again"]
    for made in more:
        made.close()


def test_what_is_asked_outside_of_episodes_passes_over_them_too(
    serve: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead, served = nowhere(), serve()
    environment = remote(dead, served.target)
    assert environment.agents == ("agent",)
    tasks = environment.tasks("train")
    assert [tasks[index].index for index in range(0, 200, 64)] == [0, 64, 128, 192]
    monkeypatch.setattr(client, "ASK_SECONDS", 1.0)
    with pytest.raises(RemoteError, match=r"no server answers at .* within 1 s; start one .*[Rr]efused"):
        _ = remote(nowhere()).agents
    assert "does not answer (UNAVAILABLE" in caplog.text


def test_servers_that_stay_silent_are_named_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look at the clock is 20 s later, and the warnings are 30 s apart."""
    dead, ticks = nowhere(), itertools.count(0, 20)
    monkeypatch.setattr(addresses, "time", SimpleNamespace(monotonic=lambda: next(ticks)))

    def told() -> list[str]:
        return [message for message in caplog.messages if dead in message]

    class EnoughError(Exception):
        pass

    async def away(*arguments: Any, **options: Any) -> None:
        if len(told()) == 3:
            raise EnoughError
        raise addresses.StatusError(client.grpc.StatusCode.UNAVAILABLE, "away")

    monkeypatch.setattr(Connection, "call", away)
    with pytest.raises(EnoughError):
        _ = remote(dead).agents
    assert "does not answer (UNAVAILABLE" in told()[0]
    assert re.search(r"has not answered for 40 s \(UNAVAILABLE", told()[1])
    assert re.search(r"has not answered for 80 s \(UNAVAILABLE", told()[2])
