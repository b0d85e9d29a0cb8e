"""Shares of environments that follow their success, and counts that follow the shares."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.tasks import RunTasks, SuccessRateCurriculum, TaskStream, apportion
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Outcome
from mrlm_pl.episode import Message
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from tests.conftest import EchoEnvironment
from tests.data.rollout.collectors.test_asynchronous import WaitForAll
from tests.support.runs.short_fits import fingerprint
from tests.support.runs.watching import Watch


class Level(EchoEnvironment):
    """Solved always, never, or by half of the replies."""

    def __init__(self, solved: str = "half", **options: Any) -> None:
        super().__init__(**options)
        self.solved = solved

    def reply(self, message: Message) -> Outcome:
        won = {"always": True, "never": False, "half": sum(map(ord, message.content)) % 2 == 0}[self.solved]
        return Outcome({"won": float(won)}, None, success=won)


def run(model_folder: Path, **options: Any) -> tuple[GRPO, RolloutDataModule]:
    settings: dict[str, Any] = {
        "names": ["easy", "fitting", "hard"],
        "curriculum": SuccessRateCurriculum(floor=0.3, rate=0.8),
        "groups": 6,
        "group_size": 4,
        "iterations": 4,
        "sampling": Sampling(max_tokens=4),
    }
    levels = [Level("always"), Level("half"), Level("never")]
    return GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}), RolloutDataModule(
        levels, **{**settings, **options}
    )


class Unjudged(EchoEnvironment):
    """It does not say whether the task was solved, but has a metric of that name."""

    def reply(self, message: Message) -> Outcome:
        return Outcome({"letters": float(len(message.content))}, None, metrics={"success": 1.0})


def environments_of(trainer: Any) -> dict[int, Counter[str]]:
    """Groups of each environment by iteration."""
    found: dict[int, dict[str, str]] = {}
    for episode in read_episodes(Path(trainer.default_root_dir) / "episodes"):
        found.setdefault(episode.iteration, {})[episode.group] = episode.task.environment
    return {iteration: Counter(groups.values()) for iteration, groups in found.items()}


def test_what_is_neither_always_nor_never_solved_is_played_more(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = run(model_folder)
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    played = environments_of(trainer)
    assert played[0] == {"easy": 2, "fitting": 2, "hard": 2}, "nothing is known yet"
    assert played[3]["fitting"] > 3
    # By hand: from 0.5, four fifths of the way to 1 or to 0 in each iteration that the level was played in.
    p, q = 0.5, 0.5
    for iteration, seen in enumerate(metrics.steps):
        p += 0.8 * (1 - p) * (played[iteration]["easy"] > 0)
        q += 0.8 * (0 - q) * (played[iteration]["hard"] > 0)
        assert seen["rollout/easy/success_rate"] == pytest.approx(p)
        assert seen["rollout/hard/success_rate"] == pytest.approx(q)
        r = seen["rollout/fitting/success_rate"]
        pull = [p * (1 - p), r * (1 - r), q * (1 - q)]
        assert seen["rollout/fitting/weight"] == pytest.approx(0.3 / 3 + 0.7 * pull[1] / sum(pull), rel=1e-4)
    # Counts against the sum of the shares up to there.
    owed = {"easy": 2.0, "fitting": 2.0, "hard": 2.0}
    counts: Counter[str] = Counter(played[0])
    for iteration in range(1, 4):
        counts.update(played[iteration])
        for name in owed:
            owed[name] += 6 * metrics.steps[iteration - 1][f"rollout/{name}/weight"]
            assert abs(counts[name] - owed[name]) <= 1


def test_a_metric_of_an_environment_that_does_not_judge_is_no_success(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = run(model_folder, iterations=1)
    levels = RolloutDataModule(
        [Unjudged(), Level("half")],
        names=["unjudged", "fitting"],
        curriculum=SuccessRateCurriculum(floor=0.3, rate=0.8),
        groups=2,
        group_size=2,
        iterations=1,
        sampling=data.sampling,
    )
    metrics = Watch()
    quiet_trainer(callbacks=[metrics]).fit(algorithm, levels)
    assert metrics.steps[0]["rollout/unjudged/success_rate"] == 0.5, "as at the start"


def test_a_resumed_curriculum_goes_on_bit_for_bit(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = run(model_folder, minibatches=2, iterations=3)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(algorithm, data)
    whole, rates = fingerprint(algorithm), data.tasks.stream.rates
    for step in (3, 4):  # in the middle of a collection, and between two
        algorithm, data = run(model_folder, minibatches=2, iterations=3)
        quiet_trainer().fit(algorithm, data, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert fingerprint(algorithm) == whole
        assert data.tasks.stream.rates == rates


def test_admitted_groups_are_played_as_they_were_planned(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = run(model_folder, mode="async", max_lag=2, iterations=5)
    trainer = quiet_trainer(callbacks=[WaitForAll(), keep], enable_checkpointing=True)
    trainer.fit(algorithm, data)
    first = environments_of(trainer)
    # Decided when the first iteration begins, without any result.
    assert first[0] == first[1] == first[2] == {"easy": 2, "fitting": 2, "hard": 2}
    assert first[3]["fitting"] > 2
    for path in (Path(trainer.default_root_dir) / "episodes").iterdir():
        path.unlink()
    algorithm, data = run(model_folder, mode="async", max_lag=2, iterations=5)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data, ckpt_path=tmp_path / "step=2.ckpt")
    again = environments_of(trainer)
    assert (again[2], again[3]) == (first[2], first[3])


def test_a_checkpoint_of_other_environments_is_refused(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = run(model_folder, iterations=1)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(algorithm, data)
    algorithm, data = run(model_folder, names=["easy", "fitting", "harder"])
    with pytest.raises(ConfigurationError, match="resume with the same environments"):
        quiet_trainer(max_epochs=2).fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
    algorithm, data = run(model_folder, curriculum=None, iterations=1)
    quiet_trainer(max_epochs=2).fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert "the checkpoint has a curriculum and this run has none" in caplog.text


# The stream.


def stream(names: str, size: int = 10) -> TaskStream:
    sources = {name: DatasetTasks(name, "train", [{}] * size) for name in names}
    return TaskStream(sources, None, 0, SuccessRateCurriculum())


def test_counts_stay_within_one_of_shares_that_change() -> None:
    rng = random.Random(0)
    for groups in (1, 2, 5, 16):
        planned, owed, counts, first = stream("abcde"), Counter[str](), Counter[str](), 0
        for _ in range(300):
            weights = {name: rng.random() ** 3 + 0.05 for name in "abcde"}
            shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
            planned.plan(groups, shares)
            for position in range(first, first + groups):
                counts[planned[position].environment] += 1
            first += groups
            for name in "abcde":
                owed[name] += groups * shares[name]
                assert abs(counts[name] - owed[name]) <= 1 + 1e-9


def test_sources_of_a_block_take_turns_and_no_task_is_skipped() -> None:
    planned = stream("ab", size=8)
    planned.plan(8, {"a": 0.5, "b": 0.5})
    planned.plan(8, {"a": 0.5, "b": 0.5})
    tasks = [planned[position] for position in range(16)]
    assert [task.environment for task in tasks[:4]] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])
    for name in "ab":
        assert sorted(task.index for task in tasks if task.environment == name) == list(range(8))


def test_a_stream_goes_on_from_its_state() -> None:
    whole, other = stream("abc"), stream("abc")
    shares = [{"a": 0.2, "b": 0.3, "c": 0.5}, {"a": 0.6, "b": 0.3, "c": 0.1}, {"a": 0.1, "b": 0.1, "c": 0.8}]
    for block in shares[:2]:
        whole.plan(7, block)
    other.load(whole.state())
    whole.plan(7, shares[2])
    other.plan(7, shares[2])
    assert [whole[n] for n in range(21)] == [other[n] for n in range(21)]
    other.forget(14)
    assert other[14] == whole[14]
    with pytest.raises(KeyError):
        other[13]


@pytest.mark.parametrize("groups", [2, 8])
def test_a_run_that_continues_with_other_groups_plays_the_next_tasks(echo: Any, groups: int) -> None:
    before, after = (
        RunTasks([echo(), echo()], ["a", "b"], None, None, SuccessRateCurriculum(), seed=0).stream for _ in range(2)
    )
    for iteration in range(2):
        before.plan_until(iteration, iteration, groups=4)  # two tasks of each environment
    after.load(before.state())
    found = []
    for iteration in range(2, 5):
        after.plan_until(iteration, iteration, groups)
        found += [after.picked(iteration * groups + place) for place in range(groups)]
    assert sorted(found) == [(name, 4 + number) for name in "ab" for number in range(3 * groups // 2)]


def test_apportioned_numbers_are_never_below_zero() -> None:
    assert apportion({"a": -0.5, "b": 1.5}, 1) == {"a": 0, "b": 1}
    assert apportion({"a": -0.9, "b": -0.9, "c": 1.4, "d": 1.4}, 1) in (
        {"a": 0, "b": 0, "c": 1, "d": 0},
        {"a": 0, "b": 0, "c": 0, "d": 1},
    )


@pytest.mark.parametrize("value", [{"floor": 0.0}, {"floor": 1.1}, {"rate": 0.0}, {"start": 1.5}])
def test_values_out_of_range_are_refused(value: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"SuccessRateCurriculum: {next(iter(value))} is"):
        SuccessRateCurriculum(**value)


def test_nothing_to_learn_anywhere_leaves_the_weights() -> None:
    assert SuccessRateCurriculum().shares({"a": 0.7, "b": 0.3}, {"a": 1.0, "b": 0.0}) == {"a": 0.7, "b": 0.3}
