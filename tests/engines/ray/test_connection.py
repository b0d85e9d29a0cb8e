"""One Ray for all pools of a process; without Ray."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.concurrency.calls import in_daemon
from mrlm_pl.engines.ray.cluster import RayCluster
from mrlm_pl.engines.ray.connection import _SETTINGS, RayConnection
from mrlm_pl.engines.ray.gpus import GpuLedger
from mrlm_pl.errors import ConfigurationError, EngineError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Starts and ends of Ray by address; Ray itself is never started."""
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
    assert events == ["start None"], "closing twice gives back once"
    reference.close()
    assert events == ["start None", "end None"]
    RayCluster("head:1").close()
    assert events[2:] == ["start head:1", "end head:1"], "another can be used afterwards"


def test_an_error_at_the_end_of_ray_is_told(caplog: pytest.LogCaptureFixture) -> None:
    connection = RayConnection.__new__(RayConnection)
    connection._joined, connection._stop, connection._own, connection._noted = False, threading.Event(), [], set()
    connection.address, connection._folder, connection._ready = "here", None, Future()
    connection._ready.set_result(None)
    connection._life = in_daemon(lambda: print(1 / 0))
    connection.close()
    assert "Ray at here did not shut down cleanly: division by zero" in caplog.text


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


class _NeverReserved:
    """A placement group that finds no room."""

    def wait(self, seconds: float) -> bool:
        return False


def _with_resources(cluster: RayCluster, **resources: float) -> list[Any]:
    """Give the fake Ray these resources; return the list of its reservations."""
    asked: list[Any] = []

    def placement_group(bundles: Any, strategy: str) -> _NeverReserved:
        asked.append(bundles)
        return _NeverReserved()

    cluster._connection.ray.cluster_resources = cluster._connection.ray.available_resources = lambda: resources
    cluster._connection.ray.util = SimpleNamespace(placement_group=placement_group, remove_placement_group=print)
    cluster._connection.broken = lambda: True
    return asked


def test_what_an_own_ray_has_not_is_refused_at_once(events: list[str]) -> None:
    cluster = RayCluster(None)
    asked = _with_resources(cluster, CPU=4.0)
    with pytest.raises(EngineError, match=r"lacks 6 CPU \(there are 4\), 2 GPU \(there are 0\); ask for fewer"):
        cluster.reserve([{"CPU": 3.0, "GPU": 1.0}] * 2, "PACK", 180.0)
    assert not asked, "Ray would wait"
    with pytest.raises(EngineError, match=r"could not reserve .* within 0 s"):
        cluster.reserve([{"CPU": 2.0, "GPU": 0.0}] * 2, "PACK", 0.0)
    assert asked == [[{"CPU": 2.0}, {"CPU": 2.0}]], "what there is may only be taken at the moment"
    cluster.close()


def test_a_cluster_that_has_not_enough_is_waited_for_with_a_word(
    events: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = RayCluster("head:1")
    asked = _with_resources(cluster, CPU=8.0, GPU=1.0)
    with pytest.raises(EngineError, match="within 5 s"):
        cluster.reserve([{"CPU": 1.0, "GPU": 1.0}] * 2, "PACK", 5.0)
    assert len(asked) == 1
    (record,) = [record for record in caplog.records if record.name.startswith("mrlm_pl.engines.ray")]
    assert record.getMessage() == ("Ray at head:1 lacks 2 GPU (there are 1); waiting up to 5 s for more machines")
    cluster.close()


def _failed_start(monkeypatch: pytest.MonkeyPatch, address: str | None, seconds: float) -> str:
    """Return the error of a Ray whose start fails."""

    def init(**options: Any) -> None:
        raise RuntimeError("The current node timed out during startup")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(EngineError) as caught:
        RayConnection(address, seconds)
    return str(caught.value)


def test_ray_may_take_as_long_to_start_as_the_deadline_says(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "RAY_raylet_start_wait_time_s"
    for name in (variable, *_SETTINGS):
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    error = _failed_start(monkeypatch, "nowhere", 90.5)
    assert variable not in os.environ
    assert "ray start --head" in error
    error = _failed_start(monkeypatch, None, 90.5)
    assert os.environ[variable] == "91"
    assert "load of the processors" in error
    assert "deadlines.start" in error
    monkeypatch.setenv(variable, "7")
    _failed_start(monkeypatch, None, 90.5)
    assert os.environ[variable] == "7", "the user's own"


def test_the_head_is_asked_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = RayConnection.__new__(RayConnection)
    connection.address, connection._own = "head:1", []
    connection._answered, connection._silent_since, connection._looking = -math.inf, None, threading.Lock()
    asked: list[int] = []
    monkeypatch.setattr(connection, "broken", lambda: bool(asked.append(1)))
    for _ in range(50):
        connection.check(0.0)
    assert len(asked) == 1
    connection._answered = 0.0
    monkeypatch.setattr(connection, "broken", lambda: True)
    with pytest.raises(EngineError, match="head:1 has not answered"):
        connection.check(0.0)


@pytest.mark.parametrize("asked", [None, "auto", "10.1.2.3:6379", "10.1.2.3:6380"])
def test_another_ray_than_the_process_has_joined_is_refused(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.1.2.3:6379")
    joined = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=lambda: "10.1.2.3"),
        _private=SimpleNamespace(worker=SimpleNamespace(_global_node=None)),
    )
    monkeypatch.setitem(sys.modules, "ray", joined)
    for name in _SETTINGS:
        monkeypatch.setenv(name, "0")
    if asked == "10.1.2.3:6380":
        with pytest.raises(ConfigurationError, match=f"Ray at {asked} is asked for, .* joined Ray at 10.1.2.3:6379"):
            RayConnection(asked, 5.0)
    else:
        assert RayConnection(asked, 5.0).address == "10.1.2.3:6379"
