"""The examples and configurations of adapters play and learn."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.documents import ROOT


def test_the_round_trip_over_openenv(example: Callable[[str], ModuleType]) -> None:
    assert example("adapters/openenv_round_trip.py").main() == [1.0, 0.0]


@pytest.mark.slow
def test_a_generator_of_reasoning_gym_is_learned(mrlm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    status, _, errors = mrlm("fit", "--config", "configs/tasks/adapters/reasoning_gym.yaml", "--output", str(run))
    assert status == 0, errors
    with (run / "metrics.csv").open() as file:
        rewards = [float(row["rollout/reward"]) for row in csv.DictReader(file) if row["rollout/reward"]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
