from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import MathEnvironment

from mrlm_pl.data.rollout.tasks import RunTasks, SuccessRateCurriculum, TaskStream
from mrlm_pl.environment import DatasetTasks, SeededTasks
from mrlm_pl.errors import ConfigurationError


def source(name: str, size: int) -> DatasetTasks:
    return DatasetTasks(name, "train", [{"n": n} for n in range(size)])


def test_every_epoch_of_a_data_set_holds_each_task_once_in_another_order() -> None:
    stream = TaskStream({"a": source("a", 20)}, None, seed=3)
    epochs = [[stream[epoch * 20 + n].index for n in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_position_gives_the_same_task_whatever_was_read_before() -> None:
    streams = [TaskStream({"a": source("a", 7), "b": source("b", 5)}, [2, 1], seed=1) for _ in range(2)]
    for position in range(50):
        streams[0][position]
    assert streams[0][33] == streams[1][33]


def test_counts_stay_within_one_of_their_shares() -> None:
    weights = [0.5, 0.3, 0.2]
    stream = TaskStream({name: source(name, 10) for name in "abc"}, weights, seed=0)
    counts: Counter[str] = Counter()
    for position in range(500):
        counts[stream[position].environment] += 1
        for name, weight in zip("abc", weights, strict=True):
            assert abs(counts[name] - weight * (position + 1)) <= 1


@pytest.mark.parametrize("curriculum", [None, SuccessRateCurriculum()])
def test_a_source_of_weight_0_is_not_read(curriculum: SuccessRateCurriculum | None) -> None:
    stream = TaskStream({name: source(name, 10) for name in "abc"}, [0, 1, 2], 0, curriculum)
    stream.plan_until(0, 9, 30)
    assert Counter(stream[position].environment for position in range(300)) == {"b": 100, "c": 200}


def test_an_environment_that_is_only_evaluated_needs_no_training_split(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    benchmark = MathEnvironment(data={"test": str(tmp_path / "rows.jsonl")})
    stream = RunTasks([MathEnvironment(), benchmark], ["a", "b"], None, [1, 0], SuccessRateCurriculum(), 0).stream
    assert stream.update({"a": (8, 8)}) == {"rollout/a/success_rate": 0.6, "rollout/a/weight": 1.0}
    with pytest.raises(ConfigurationError, match="has no split 'train'"):
        RunTasks([MathEnvironment(), benchmark], ["a", "b"], None, None, None, 0)


def test_an_endless_source_is_read_in_order() -> None:
    endless = SeededTasks("g", "train", lambda rng: {"n": rng.randint(0, 10**9)}, lambda data: str(data["n"]))
    assert [TaskStream({"g": endless}, None, 0)[n].index for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "weights", [[1.0, float("inf")], [1.0], [1.0, -1.0], [0.0, 0.0], ["1.0", 1.0], {"a": 3.0, "b": 1.0}]
)
def test_weights_must_fit_the_environments(weights: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.weights is .*; give a list with one finite number"):
        TaskStream({"a": source("a", 2), "b": source("b", 2)}, weights, 0)


def test_what_a_long_run_has_read_is_not_kept() -> None:
    stream = TaskStream({"a": source("a", 4), "b": source("b", 4)}, [2, 1], seed=0)
    whole = [stream[position] for position in range(600)]
    again = TaskStream({"a": source("a", 4), "b": source("b", 4)}, [2, 1], seed=0)
    for position in range(600):
        again.forget(position)
        assert again[position] == whole[position]
    assert len(again._picks) == 1
    assert len(again._orders) <= 2 * 2


def test_orders_of_epochs_that_a_long_run_skips_are_not_kept() -> None:
    """Eleven tasks are reserved for each position, so that a data set of four lasts less than one."""
    stream = TaskStream({"a": source("a", 4)}, None, seed=0)
    for position in range(100):
        for number in (0, 10):
            stream.attempt(position, number, 11)
    assert len(stream._orders) <= 2


def test_all_that_may_begin_is_decided_before_another_thread_reads_it(echo: Any) -> None:
    """Groups of iterations 2 and 3 may begin; those before are not read again."""
    whole = RunTasks([echo(), echo()], ["a", "b"], None, [2, 1], None, seed=0).stream
    names = [whole[position].environment for position in range(16)]
    stream = RunTasks([echo(), echo()], ["a", "b"], None, [2, 1], None, seed=0).stream
    stream.plan_until(2, 3, groups=4)
    assert (stream.planned, list(stream._picks)) == (16, list(range(8, 16)))
    assert [stream[position].environment for position in range(8, 16)] == names[8:]
    assert stream.planned == 16, "a read decides nothing"
