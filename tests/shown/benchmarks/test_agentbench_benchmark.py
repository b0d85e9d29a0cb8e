"""The benchmark of AgentBench's tasks, small and with an untrained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy


@pytest.fixture
def benchmark(learning_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = learning_benchmark("agentbench")
    small = {"GROUPS": 1, "GROUP_SIZE": 2, "EPISODES": 3, "ROWS": 60, "SAMPLING": Sampling(max_tokens=16)}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize("arm", ["GiGPO", "IPPO, team"])
@pytest.mark.long
def test_a_run_spends_its_budget_and_is_evaluated_before_and_after(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arm: str
) -> None:
    script = sys.modules["make_agentbench_demonstrations"]
    given = ["script", "--environment", "knowledge_graph", "--output", str(tmp_path), "--episodes", "20"]
    monkeypatch.setattr("sys.argv", given)
    script.main()
    policy = Policy(str(tmp_path / "untrained"), random_init_seed=0)
    policy.load()
    policy.model.save_pretrained(tmp_path / "untrained")

    row = benchmark.run("knowledge_graph", arm, tmp_path / "untrained", 0, 600)
    most = 2 * 8 * 16  # tokens of a rollout
    assert 600 - 2 * most < row["generated_tokens"] <= 600 + most
    assert row["episodes"] == 2 * row["iteration"] > 0
    assert row["before"] == row["after"] == {"reward": 0.0, "success": 0.0}, "random weights answer nothing"
    json.dumps(row)


def test_held_out_tasks_of_the_graph_are_later_ones_that_are_not_in_the_rows(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = benchmark.make_environment("knowledge_graph").tasks("train")
    monkeypatch.setitem(benchmark.HELD_OUT, "knowledge_graph", ("train", 58))
    assert list(benchmark.held_out("knowledge_graph")) == [source[index] for index in (60, 61, 62)]


def test_differences_are_paired_by_seed(benchmark: ModuleType) -> None:
    def runs(*after: float) -> list[dict[str, Any]]:
        zero = {"reward": 0.0, "success": 0.0}
        return [
            {"seed": seed, "before": zero, "after": {"reward": value, "success": value}}
            for seed, value in enumerate(after)
        ]

    later = runs(0, 0, 0, 0.6, 0.7, 0.8)[3:]
    found = benchmark.summary(
        {"GRPO": runs(0.5, 0.6, 0.7), "GiGPO": runs(0.6, 0.7, 0.8)[::-1], "IPPO": later, "IPPO, team": runs(0.5)}
    )
    # 0.1 for every seed; the standard error of 0.5, 0.6, 0.7 is 0.1 / sqrt(3), and 4.303 its quantile
    assert found["GiGPO"]["success minus GRPO"] == [0.1, 0.0]
    assert found["GRPO"]["success after"] == [0.6, 0.248]
    assert "success minus GRPO" not in found["GRPO"]
    assert "success minus IPPO" not in found["IPPO, team"], "its seeds are others"
