"""The examples with reasoning-gym and OpenEnv play, and the configuration of reasoning-gym learns after its recipe."""

from __future__ import annotations

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
        numbers = [int(number) for number in question.removeprefix("Calculate ").removesuffix(".").split(" + ")]
        first, value = sum(numbers[:2]), sum(numbers)
        right += f"<answer>{value}</answer>" in answer
        worked = f"{numbers[0]}+{numbers[1]}={first}; {first}+{numbers[2]}={value} "
        assert answer.startswith(worked) == (f"<answer>{value}</answer>" in answer)
    assert 52 <= right <= 108  # 80 of 200 expected, standard deviation 6.9


@pytest.mark.slow
def test_the_configuration_learns(
    mrlm, example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    example("adapters/make_sums_demonstrations.py").write_demonstrations(Path("runs/tiny-sums.jsonl"), 6_400)
    for config, run in (("recipes/tiny_sums", "tiny-sums"), ("tasks/adapters/reasoning_gym", "grpo")):
        status, _, errors = mrlm("fit", "--config", str(ROOT / "configs" / f"{config}.yaml"), "--output", f"runs/{run}")
        assert status == 0, errors
    reports = [json.loads(Path(f"runs/grpo/evaluation_{moment}.json").read_text()) for moment in ("before", "after")]
    before, after = (report["reasoning_gym"]["accuracy_ci95"] for report in reports)
    assert after[0] > before[1], "the held-out accuracy rises"
