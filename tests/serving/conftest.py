"""Servers for the tests of remote environments."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.serving.environments import client, sessions
from mrlm_pl.serving.environments.service import Limits
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport import addresses, connection
from tests.support.servers.environment_servers import Scripted, Served, ServerProcess, offer


@pytest.fixture(autouse=True)
def unshared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide what earlier tests of this process have learned about servers: a port may come again."""
    silent = addresses._silent_since
    monkeypatch.setattr(addresses, "_gone", {})
    monkeypatch.setattr(addresses, "_silent_since", {})
    monkeypatch.setattr(addresses, "_full", {})
    monkeypatch.setattr(addresses, "_turns", defaultdict(itertools.count))
    monkeypatch.setattr(client, "_reached", {})
    yield
    silent.update(addresses._silent_since)  # a request that still waits for them warns in no test of other packages
    for asking in addresses._gone.values():  # nor is anybody asked on, whose port another may have by then
        asking.get_loop().call_soon_threadsafe(asking.cancel)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time by which the leases of servers in this process run out: it stands still until a test moves ``now``."""
    made = SimpleNamespace(now=time.monotonic(), monotonic=lambda: made.now)
    monkeypatch.setattr(sessions, "time", made)
    return made


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Starts servers: options are those of ``EnvironmentServer``, ``Limits`` and ``Endpoint``, and ``offer``."""
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    Scripted.gate = threading.Event()
    Scripted.era, Scripted.steps, Scripted.closed, Scripted.made = Scripted.era + 1, [], [], 0
    started: list[Served] = []

    def start(**options: Any) -> Served:
        fresh = "port" not in options
        endpoint = Endpoint(
            **{key: options.pop(key) for key in ("host", "port", "token", "identity") if key in options}
        )
        names = ("lease_seconds", "step_seconds", "sessions", "message_mb")
        limits = Limits(**{"step_seconds": 20.0, **{key: options.pop(key) for key in names if key in options}})
        server = EnvironmentServer(options.pop("offer", None) or offer(), endpoint, limits, **options)
        loop = EventLoopThread()
        loop.submit(server.start()).result(100)
        started.append(Served(server, loop))
        if fresh and connection._process is not None:  # a connection knows the token of the server that it was made for
            known = connection._process.connections
            for address in [item for item in known if item.target == started[-1].target]:
                del known[address]
        return started[-1]

    yield start
    Scripted.gate.set()
    stopping = [served.loop.submit(served.server.stop()) for served in started]
    for served, stopped in zip(started, stopping, strict=True):
        stopped.result(100)
        served.stop()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """A server with the environments of this file."""
    return serve()


@pytest.fixture
def process() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers in processes."""
    started: list[ServerProcess] = []

    def start(*arguments: Any, **options: Any) -> ServerProcess:
        started.append(ServerProcess(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.end()
