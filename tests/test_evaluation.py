from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.evaluation import evaluation_specs, mean_interval, pass_at_k, summarize, wilson_interval


def episode(task: int, reward: float, success: bool | None = None, error: str | None = None) -> Episode:
    turn = Turn("agent", 0, 1, 2, reward, {"correct": reward}, "stop", "main", 0, "e")
    row = Trajectory("agent", "main", (1, 2), (False, True), (0.0, -1.0), (turn,), (Message("user", "Q"),))
    return Episode(
        id=f"{task}-{reward}",
        task=Task("math", "test", task),
        group=str(task),
        seed=0,
        iteration=-1,
        trajectories={} if error else {"agent": (row,)},
        stop_reason="answered",
        success=success,
        error=error,
    )


def summary(episodes: list[Episode]):
    return summarize(episodes, environment="math", model="m", split="test", seed=0)


def test_the_report_has_the_documented_keys_and_survives_json() -> None:
    data = summary([episode(0, 1.0, True), episode(1, 0.0, False)]).to_dict()
    documented = "environment model split seed episodes mean_reward ci95 accuracy pass_at_k components transcripts"
    assert set(documented.split()) <= set(data)
    assert json.loads(json.dumps(data, allow_nan=False))["mean_reward"] == 0.5


def test_numbers_by_hand() -> None:
    report = summary([episode(0, 1.0, True), episode(1, 0.0, False), episode(2, 1.0, True), episode(3, 1.0, True)])
    # mean .75, s^2 = (3 * .0625 + .5625) / 3 = .25, standard error .25
    assert report.ci95 == pytest.approx((0.75 - 1.959964 * 0.25, 0.75 + 1.959964 * 0.25), abs=1e-5)
    assert report.accuracy == 0.75
    assert report.pass_at_k == {"1": 0.75}
    assert report.components == {"correct": 0.75}


def test_pass_at_k_over_tasks() -> None:
    # task 0: 1 of 4 right, task 1: 4 of 4
    report = summary([episode(0, 0.0, n == 0) for n in range(4)] + [episode(1, 1.0, True) for _ in range(4)])
    assert report.pass_at_k == pytest.approx({"1": (0.25 + 1) / 2, "2": (0.5 + 1) / 2, "4": 1.0})


def test_repeated_samples_of_a_task_are_not_independent() -> None:
    alone = mean_interval([[1.0], [0.0]])
    repeated = mean_interval([[1.0] * 10, [0.0] * 10])
    assert repeated == pytest.approx(alone)
    assert mean_interval([[1.0, 0.0]]) == (-math.inf, math.inf)


def test_failed_episodes_are_counted_and_not_scored() -> None:
    report = summary([episode(0, 1.0, True), episode(1, 0.0, None, error="away")])
    assert (report.episodes, report.failed, report.mean_reward, report.accuracy) == (1, 1, 1.0, 1.0)
    with pytest.raises(RolloutError, match="away"):
        summary([episode(0, 0.0, None, error="away")])


def test_an_environment_that_says_nothing_of_success_has_no_accuracy() -> None:
    report = summary([episode(0, 1.0), episode(1, 0.5)])
    assert report.accuracy is None
    assert report.pass_at_k == {}


def test_known_values_of_the_intervals() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)  # published table values
    assert pass_at_k(3, 10, 5) == pytest.approx(1 - math.comb(7, 5) / math.comb(10, 5))


def test_specs_choose_without_replacement_and_by_the_seed(echo: Any) -> None:
    first, again, other = (evaluation_specs(echo(size=50), 20, "test", seed) for seed in (0, 0, 1))
    assert first == again
    assert len({spec.task.index for spec in first}) == 20
    assert {spec.task.index for spec in first} != {spec.task.index for spec in other}
    assert len(evaluation_specs(echo(size=5), 20, "test", 0)) == 5
    with pytest.raises(ConfigurationError, match="multiple of samples_per_task 3"):
        evaluation_specs(echo(), 20, "test", 0, samples_per_task=3)
