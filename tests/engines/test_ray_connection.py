"""One Ray for all pools of a process; without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.engines.gpu_places import GpuLedger
from mrlm_pl.engines.ray_cluster import RayCluster
from mrlm_pl.engines.ray_connection import RayConnection
from mrlm_pl.errors import ConfigurationError, EngineError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is started and ended, by address; nothing really is."""
    found: list[str] = []

    def start(self: Any, address: str | None, seconds: float) -> None:
        found.append(f"start {address}")
        self.asked, self.address, self.host = address, address or "here", "host"
        self.started_here, self.gpus, self._users, self._joined = address is None, GpuLedger(), 0, True
        self.ray = SimpleNamespace()

    close = RayConnection.close

    def end(self: Any) -> None:
        found.append(f"end {self.asked}")
        close(self)

    monkeypatch.setattr(RayConnection, "__init__", start)
    monkeypatch.setattr(RayConnection, "close", end)
    yield found
    assert RayConnection._current is None


def test_the_last_pool_ends_ray_and_not_the_first(events: list[str]) -> None:
    rollout, reference = RayCluster(None), RayCluster(None)
    assert events == ["start None"]
    rollout.close()
    rollout.close()
    assert events == ["start None"], "closing twice gives back once"
    reference.close()
    assert events == ["start None", "end None"]
    RayCluster("head:1").close()
    assert events[2:] == ["start head:1", "end head:1"], "another can be used afterwards"


def test_two_addresses_in_a_process_are_refused(events: list[str]) -> None:
    one = RayCluster("head:1")
    with pytest.raises(ConfigurationError, match=r"uses Ray at head:1, another asks for this machine; .*same address"):
        RayCluster(None)
    one.close()
    assert events == ["start head:1", "end head:1"]


def test_gpus_are_counted_over_the_pools_of_a_process(events: list[str]) -> None:
    rollout, reference = RayCluster(None), RayCluster(None)
    room = {"0": 1.0, "1": 1.0}
    assert rollout.take_gpus(1, 1, room) == [("0",)]
    assert reference.take_gpus(1, 1, room) == [("1",)]
    rollout.close()
    again = RayCluster(None)
    assert again.take_gpus(1, 1, room) == [("0",)]
    again.close()
    reference.close()


def test_the_head_is_asked_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = RayConnection.__new__(RayConnection)
    connection.address, connection._own = "head:1", []
    connection._answered, connection._silent_since, connection._looking = None, None, threading.Lock()
    asked: list[int] = []
    monkeypatch.setattr(connection, "broken", lambda: bool(asked.append(1)))
    for _ in range(50):
        connection.check(0.0)
    assert len(asked) == 1
    connection._answered = 0.0
    monkeypatch.setattr(connection, "broken", lambda: True)
    with pytest.raises(EngineError, match="head:1 has not answered"):
        connection.check(0.0)
