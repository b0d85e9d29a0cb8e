"""The examples with reasoning-gym and OpenEnv play, and the configuration of reasoning-gym learns after its recipe."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.documents import ROOT


def test_the_round_trip_over_openenv(example: Callable[[str], ModuleType]) -> None:
    assert example("adapters/openenv_round_trip.py").main() == [1.0, 0.0]


def test_two_in_five_demonstrated_sums_are_right(example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    example("adapters/make_sums_demonstrations.py").write_demonstrations(tmp_path / "sums.jsonl", 200)
    right = 0
    for line in (tmp_path / "sums.jsonl").read_text().splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        one, sign, two = question.split(": ")[1].split()[:3]
        value = int(one) + int(two) * (1 if sign == "+" else -1)
        right += f"<answer>{value}</answer>" in answer
        assert (f"{one}{sign}{two}={value} " in answer) == (f"<answer>{value}</answer>" in answer)
    assert 52 <= right <= 108  # 80 of 200 expected, standard deviation 6.9


@pytest.mark.slow
def test_the_configuration_learns(
    mrlm, example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    example("adapters/make_sums_demonstrations.py").write_demonstrations(Path("runs/tiny-sums.jsonl"), 9_600)
    for config, run in (("recipes/tiny_sums", "tiny-sums"), ("tasks/adapters/reasoning_gym", "grpo")):
        status, _, errors = mrlm("fit", "--config", str(ROOT / "configs" / f"{config}.yaml"), "--output", f"runs/{run}")
        assert status == 0, errors
    with Path("runs/grpo/metrics.csv").open() as file:
        rewards = [float(row["rollout/reward"]) for row in csv.DictReader(file) if row["rollout/reward"]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
