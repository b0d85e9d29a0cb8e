"""The engines that are closed with the players of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.engines import RoutingEngine
from tests.engines.test_routing import Noting


def test_connections_to_servers_are_closed_and_an_engine_that_was_given_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given, there = Noting("given"), Noting("there")

    def with_served(engine: Any, policies: Any) -> RoutingEngine:
        return RoutingEngine(engine, {"a": there, "b": there})

    monkeypatch.setattr("mrlm_pl.serving.policies.placement.with_served", with_served)
    players = Players({}, given, False, {}, None)
    monkeypatch.setattr("mrlm_pl.engines.base.LearnerPlace.of_trainer", lambda trainer: None)
    served = SimpleNamespace(served_by="127.0.0.1:1")
    players.learner = SimpleNamespace(policies=["a"], policy=lambda name: served, trainer=None)  # type: ignore[assignment]
    assert isinstance(players.engine, RoutingEngine)
    players.close()
    assert (given.notes, there.notes) == ([], ["close"])
    players.close()
    assert there.notes == ["close"]
