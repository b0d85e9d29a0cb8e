"""Verifier servers for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mrlm_pl.reward_models import TextScorer
from tests.support.servers.environment_servers import ServerProcess
from tests.support.servers.verifier_servers import LyingServer, Spoken, Verifier


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the token."""
    monkeypatch.delenv("MRLM_TOKEN", raising=False)


@pytest.fixture
def serve() -> Iterator[Callable[..., Verifier]]:
    """Starts servers of scorers; options are those of ``Verifier``."""
    started: list[Verifier] = []

    def start(scorer: TextScorer | None = None, **options: Any) -> Verifier:
        started.append(Verifier(scorer or Spoken(), **options))
        return started[-1]

    yield start
    for server in started:
        getattr(server.scorer, "gate", Spoken().gate).set()
        server.stop()


@pytest.fixture
def lying() -> Iterator[Callable[..., LyingServer]]:
    """Starts servers that answer with the result of a function."""
    started: list[LyingServer] = []

    def start(answer: Callable[..., Any]) -> LyingServer:
        started.append(LyingServer(answer))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def process() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers in processes."""
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        started.append(ServerProcess(arguments=list(arguments)))
        return started[-1]

    yield start
    for server in started:
        server.end()
