from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.comparison import compare, read_report, rewards_differ
from mrlm_pl.evaluation.intervals import mean_interval, pass_at_k, ratio_interval, wilson_interval
from mrlm_pl.evaluation.summary import evaluation_specs, summarize


def episode(
    task: int,
    reward: float,
    success: bool | None = None,
    error: str | None = None,
    said: str = "",
    metrics: dict[str, float] | None = None,
) -> Episode:
    turn = Turn("agent", 0, 1, 2, reward, {"correct": reward}, "stop", "main", 0, "e")
    row = Trajectory(
        "agent", "main", (1, 2), (False, True), (0.0, -1.0), (turn,), (Message("user", "Q"), Message("assistant", said))
    )
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
        metrics=metrics or {},
    )


def summary(episodes: list[Episode], majority: Any = None):
    return summarize(episodes, environment="math", model="m", split="test", seed=0, majority=majority)


def test_the_report_has_the_documented_keys_and_survives_json() -> None:
    data = summary([episode(0, 1.0, True), episode(1, 0.0, False)]).to_dict()
    documented = "environment model split seed episodes mean_reward ci95 accuracy pass_at_k components transcripts"
    assert set(documented.split()) <= set(data)
    assert json.loads(json.dumps(data, allow_nan=False))["mean_reward"] == 0.5


def test_numbers_by_hand() -> None:
    report = summary([episode(0, 1.0, True), episode(1, 0.0, False), episode(2, 1.0, True), episode(3, 1.0, True)])
    # mean 0.75, s^2 = (3 * 0.0625 + 0.5625) / 3 = 0.25, standard error 0.25, Student's t of 3 degrees 3.182446
    assert report.ci95 == pytest.approx((0.75 - 3.182446 * 0.25, 0.75 + 3.182446 * 0.25), abs=1e-5)
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


def test_equal_rewards_have_no_interval_and_equal_successes_have_wilsons() -> None:
    report = summary([episode(task, 1.0, True) for task in range(20)])
    assert report.to_dict()["ci95"] == [None, None]
    told = str(report)
    assert "\nmean reward    1.0000  no 95 % interval (equal values or one task)\n" in told
    assert "\naccuracy       1.0000  95 % [0.8389, 1.0000]\n" in told  # 20 / (20 + 1.96^2)


def test_the_number_of_problems_is_told_where_it_is_below_that_of_the_episodes() -> None:
    few = str(summary([episode(task, 0.0, False) for task in (0, 0, 1, 2, 3)]))
    assert "\nepisodes       5; 4 different problems\n" in few
    assert "problem" not in str(summary([episode(task, 0.0, False) for task in range(10)]))


def test_failed_episodes_are_counted_and_not_scored() -> None:
    report = summary([episode(0, 1.0, True), episode(1, 0.0, None, error="away")])
    assert (report.episodes, report.failed, report.mean_reward, report.accuracy) == (1, 1, 1.0, 1.0)


def test_a_report_of_failures_alone_has_no_numbers(caplog: pytest.LogCaptureFixture) -> None:
    report = summary([episode(index, 0.0, None, error="away") for index in range(3)])
    assert (report.episodes, report.failed, report.accuracy, report.pass_at_k) == (0, 3, None, {})
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (data["mean_reward"], data["ci95"]) == (None, [None, None])
    assert [item["error"] for item in data["transcripts"]] == ["away"] * 3
    assert "3 of 3 episodes of 'math' failed" in caplog.text
    assert "the environment with `mrlm check-env`," in caplog.text, "the name of an own environment is no short name"


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


def test_metrics_are_means_over_those_that_have_them_and_shares_of_what_they_count() -> None:
    found = summary(
        [
            episode(0, 1.0, metrics={"parsed": 1.0, "improved": 1.0, "improved_of": 1.0}),
            episode(1, 1.0, metrics={"parsed": 0.0, "improved": 0.0, "improved_of": 3.0}),
            episode(2, 1.0, metrics={"late": 0.5, "improved": 0.0, "improved_of": 0.0, "never": 0.0, "never_of": 0.0}),
            episode(3, 1.0, metrics={"moves": 1.0}),
            episode(4, 1.0, metrics={"moves": 3.0}),
        ]
    ).metrics
    assert {name: (number.value, number.of) for name, number in found.items()} == {
        "parsed": (0.5, 2),
        "late": (0.5, 1),
        "improved": (0.25, 4),
        "moves": (2.0, 2),
        "never": (None, 0),
    }
    assert found["parsed"].ci95 == pytest.approx(wilson_interval(1, 2)), "every value is 0 or 1"
    # 1 of 4 cases in clusters of 1 and 3: Kish's effective number 16 / 10, the least that Wilson's formula is given
    assert found["improved"].ci95 == pytest.approx(wilson_interval(0.25 * 1.6, 1.6))
    assert found["late"].ci95 == (0.0, 1.0), "one value between 0 and 1"
    assert found["moves"].ci95 == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-3), "t(1) = 12.7062, error 1"
    assert found["never"].ci95 is None


def test_shares_with_one_case_in_each_group_have_the_interval_of_a_mean() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert ratio_interval([(value, 1.0) for value in values]) == pytest.approx(mean_interval([[v] for v in values]))


def most_say_5(task: Task, replies: Any) -> bool:
    return sum(reply == "5" for reply in replies) > len(replies) / 2


def said(task: int, *texts: str) -> list[Episode]:
    return [episode(task, 0.0, text == "5", said=text) for text in texts]


def test_majorities_of_samples_are_taken_in_blocks() -> None:
    report = summary([*said(0, "5", "5", "4", "5"), *said(1, "5", "5", "4", "4")], most_say_5)
    # of two: task 0 (5 5) right, (4 5) not; task 1 (5 5) right, (4 4) not. Of four: task 0 right.
    assert report.majority_at_k == {"2": 0.5, "4": 0.5}
    assert [(item["task"], item["accuracy"], item["majority"]) for item in report.tasks] == [
        ("math/test/0", 0.75, True),
        ("math/test/1", 0.5, False),
    ]
    assert report.decisions_per_task == 4
    assert summary(said(0, "5"), most_say_5).majority_at_k == {}
    assert summary(said(0, "5", "5"), lambda task, replies: None).majority_at_k == {}


def test_a_majority_that_fails_leaves_the_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    def broken(task: Task, replies: Any) -> bool:
        raise OSError("away")

    found = summary(said(0, "5", "5"), broken)
    assert (found.episodes, found.majority_at_k, found.tasks[0]["majority"]) == (2, {}, None)
    assert caplog.text.count("OSError: away; the report is made without it") == 1


def as_data(report: Any) -> dict[str, Any]:
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_the_gain_is_the_mean_difference_of_pairs_of_tasks() -> None:
    team = summary([episode(task, 0.0, success) for task, success in enumerate((True, True, True, True))])
    one = summary([*said(0, "5", "5", "4"), *said(1, "4", "4", "5"), *said(2, "5", "5", "5")], most_say_5)
    found = compare(as_data(team), as_data(one))
    # tasks 0 to 2: 1 - 1, 1 - 0, 1 - 1
    assert (found.gain, found.own, found.other) == pytest.approx((1 / 3, 1.0, 2 / 3))
    assert found.tasks == 3
    assert (found.own_measure, found.other_measure) == ("accuracy", "majority@3")
    assert (found.own_decisions, found.other_decisions) == (1.0, 3.0)
    half = 4.302653 * math.sqrt(1 / 3 / 3)  # s^2 = (4 + 1 + 1) / 9 / 2 of three differences, t of 2 degrees
    assert 1 / 3 - half < -1
    assert found.ci95 == (-1.0, 1.0), "a gain lies in [-1, 1]: three tasks tell nothing"
    assert compare(as_data(one), as_data(team)).own_measure == "majority@3"


def test_a_task_whose_other_samples_failed_is_compared_by_its_majority_as_well() -> None:
    team = summary([episode(task, 0.0, True) for task in (0, 1)])
    failed = [episode(1, 0.0, error="away"), episode(1, 0.0, error="away")]
    found = compare(as_data(team), as_data(summary([*said(0, "5", "5", "4"), *said(1, "4"), *failed], most_say_5)))
    assert (found.other_measure, found.other) == ("majority@1-3", 0.5)
    assert found.gain == 0.5


@pytest.mark.parametrize("success", [None, True])
def test_rewards_are_compared_where_an_evaluation_has_no_accuracy(success: bool | None) -> None:
    own = summary([episode(0, 4.0), episode(0, 8.0), episode(1, 2.0), episode(1, 2.0)])
    other = summary([episode(0, 1.0, success), episode(1, 3.0, success)])
    found = compare(as_data(own), as_data(other))
    assert (found.own_measure, found.own, found.other_measure, found.other) == ("mean reward", 4.0, "mean reward", 2.0)
    # Differences 5 and -1: s = sqrt(18), t of 1 degree 12.7062, so that 2 +- 12.7062 * 3.
    assert (found.gain, *found.ci95) == pytest.approx((2.0, 2 - 38.1186, 2 + 38.1186), abs=1e-3)


def test_rewards_are_compared_beside_accuracies() -> None:
    own, other = (as_data(summary([episode(0, first, True), episode(1, 0.0, False)])) for first in (1.2, 1.0))
    assert (rewards_differ(own), rewards_differ(other)) == (True, False)
    assert compare(own, other).gain == 0.0
    found = compare(own, other, rewards=True)
    assert (found.own_measure, found.own, found.other, found.gain) == ("mean reward", 0.6, 0.5, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("bounds", "clipped"), [((0.0, 1.2), (True, False)), ((0.5, 0.8), (False, False)), (None, (False, False))]
)
def test_the_interval_of_a_mean_reward_ends_at_declared_bounds_that_hold(
    bounds: Any, clipped: tuple[bool, ...]
) -> None:
    episodes = [episode(task, float(task == 0)) for task in range(4)]
    low, high = mean_interval([[item.reward] for item in episodes])
    assert low < 0 < high < 1.2
    about: dict[str, Any] = {"environment": "math", "model": "m", "split": "test", "seed": 0}
    found = summarize(episodes, bounds=lambda task: bounds, **about).ci95
    assert found == (0.0 if clipped[0] else low, high)
    assert summarize(episodes, bounds=lambda task: (0.0, 1.0), **about).ci95 == (0.0, min(high, 1.0))
    assert summarize(episodes[1:], bounds=lambda task: (0.0, 1.0), **about).ci95 == (-math.inf, math.inf)


def test_the_declared_bounds_are_those_of_all_tasks_for_the_mean_of_a_team() -> None:
    episodes = [episode(task, float(task == 0)) for task in range(4)]
    low, high = mean_interval([[item.reward] for item in episodes])
    about: dict[str, Any] = {"environment": "math", "model": "m", "split": "test", "seed": 0}
    several = summarize(episodes, bounds=lambda task: (-0.1, 0.5) if task.index else (0.0, 1.0), **about).ci95
    assert several == (-0.1, 1.0)
    assert summarize(episodes, bounds=lambda task: (0.0, 1.0) if task.index else None, **about).ci95 == (low, high)
    teams = [replace(item, agents=("agent", "other")) for item in episodes]
    assert summarize(teams, bounds=lambda task: (-1.0, 1.0), **about).ci95 == (low / 2, 0.5)


def test_episodes_and_turns_that_a_limit_cut_are_told_apart() -> None:
    text = str(summary([episode(0, 1.0, True)]))
    assert "answered 1; 0.0000 truncated by a limit" in text
    assert "of 1.0 tokens; 0.0000 truncated at max_tokens" in text
    half = replace(summary([episode(0, 1.0, True)]), precision="bf16-mixed")
    assert "\nprecision      bf16-mixed\n" in str(half)


def test_a_printed_report_has_the_sampling_and_the_changed_settings() -> None:
    report = replace(summary([episode(0, 1.0, True)]), sampling=Sampling(top_k=5), changed_settings="rows 3")
    lines = str(report).splitlines()
    assert "settings       rows 3" in lines
    assert "sampling       temperature 1, top_p 1, top_k 5, max_tokens 128" in lines
    assert any(line.startswith("mean reward    1.0000") for line in lines)
    shown: list[str] = []
    report._repr_pretty_(SimpleNamespace(text=shown.append), False)
    assert shown == [str(report)], "as IPython shows it"


def test_evaluations_that_cannot_be_compared_are_refused(tmp_path: Any) -> None:
    one, other = as_data(summary([episode(0, 1.0, True)])), as_data(summary([episode(7, 1.0, True)]))
    with pytest.raises(ConfigurationError, match="no task in common"):
        compare(one, other)
    for task in one["tasks"]:
        del task["reward"]
    for data in ({"environment": "math"}, one):
        (tmp_path / "old.json").write_text(json.dumps(data))
        with pytest.raises(ConfigurationError, match="not a report"):
            read_report(tmp_path / "old.json")
    with pytest.raises(ConfigurationError, match="there is no report"):
        read_report(tmp_path / "absent.json")
