"""Groups with episodes that fail for good: those that train, the counts, and that no environment stays open."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import GRPO, MAGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.collection import warn_if_empty
from mrlm_pl.data.rollout.collectors.groups import GroupPlan, UnfinishedGroup
from mrlm_pl.data.rollout.tasks import TaskStream
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Outcome, Step
from mrlm_pl.episode import Episode, Message, Task, by_group
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, NonFiniteError, RolloutError
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.play import EpisodeSpec
from tests.conftest import EchoEnvironment
from tests.support.runs.watching import Watch
from tests.support.servers.environment_servers import eventually


class Flaky(EchoEnvironment):
    """Breaks down at some replies; counts how many instances are open."""

    name = "flaky"
    open = most = 0
    held = False
    lock = threading.Lock()

    def __init__(self, share: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.share = share

    def copy(self) -> Environment:
        found = super().copy()
        assert isinstance(found, Flaky)
        with Flaky.lock:
            found.held = True
            Flaky.open += 1
            Flaky.most = max(Flaky.most, Flaky.open)
        return found

    def close(self) -> None:
        with Flaky.lock:  # environments are closed in several threads, and may be closed twice
            Flaky.open -= self.held
            self.held = False

    def reply(self, message: Message) -> Outcome:
        if sum(map(ord, message.content)) % self.share == 0:
            raise OSError("the back end is away")
        return super().reply(message)


class FlakyLater(Flaky):
    """The same with awaited steps, in which running episodes are cancelled."""

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().reset(task)

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().step(actions)


@pytest.fixture(autouse=True)
def none_open() -> None:
    Flaky.open = Flaky.most = 0


def none_left_open() -> None:
    """Wait until each environment is closed: a thread may be closing one."""
    eventually(lambda: Flaky.open == 0)
    assert Flaky.most > 0


def run(
    model_folder: Path, trainer: Any, environment: Environment, algorithm: type = GRPO, **options: Any
) -> tuple[RolloutDataModule, list[Episode]]:
    settings: dict[str, Any] = {"groups": 4, "group_size": 4, "iterations": 2, "sampling": Sampling(max_tokens=6)}
    data = RolloutDataModule(environment, **{**settings, "retries": 0, **options})
    trainer.fit(algorithm({"main": Policy(str(model_folder), learning_rate=1e-3)}), data)
    return data, list(read_episodes(Path(trainer.default_root_dir) / "episodes"))


def learnt_from(monkeypatch: pytest.MonkeyPatch) -> list[Episode]:
    """The episodes that the algorithm is given, in the list that is returned."""
    seen: list[Episode] = []
    credit = GRPO.credit

    def noting(self: GRPO, episodes: Any, *arguments: Any) -> Any:
        seen.extend(episodes)
        return credit(self, episodes, *arguments)

    monkeypatch.setattr(GRPO, "credit", noting)
    return seen


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_left_of_a_group_is_learnt_from(
    mode: str, model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, metrics = learnt_from(monkeypatch), Watch()
    _, played = run(model_folder, quiet_trainer(callbacks=[metrics]), Flaky(2), mode=mode, iterations=4)
    groups = by_group(played)
    good = {name: [episode.id for episode in found if not episode.failed] for name, found in groups.items()}
    assert all(len(found) == 4 for found in groups.values()), "failed episodes are saved, and none is played for them"
    assert {len(found) for found in good.values()} > {1, 2, 3}, "the seed gives groups of several sizes"
    kept = Counter(episode.group for episode in given if not episode.failed)
    assert kept == {name: len(found) for name, found in good.items() if len(found) >= 2}
    for iteration, seen in enumerate(metrics.steps):
        here = {name: found for name, found in good.items() if name.startswith(f"{iteration}-")}
        assert seen["rollout/dropped_groups"] == sum(len(found) < 2 for found in here.values())
        assert seen["rollout/failed_episodes"] == sum(4 - len(found) for found in here.values())
    assert Flaky.most <= 16 * (1 + (mode == "async")), "environments of finished episodes are used again"
    none_left_open()


def test_a_group_with_a_failed_episode_can_be_left_out(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, metrics = learnt_from(monkeypatch), Watch()
    _, played = run(model_folder, quiet_trainer(callbacks=[metrics]), Flaky(5), iterations=4, failed_members="drop")
    groups = by_group(played)
    whole = {name for name, found in groups.items() if not any(episode.failed for episode in found)}
    assert 0 < len(whole) < len(groups) == 16
    assert {episode.group for episode in given} == whole
    assert sum(seen["rollout/dropped_groups"] for seen in metrics.steps) == len(groups) - len(whole)


def test_failed_episodes_are_played_again_with_other_seeds(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, metrics = learnt_from(monkeypatch), Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    _, played = run(
        model_folder, trainer, FlakyLater(3), mode="async", iterations=3, failed_members="resample", member_rounds=8
    )
    again = [episode for episode in played if "+" in episode.id]
    assert again
    assert len({episode.seed for episode in played}) == len(played), "every one has its own seed"
    first = {episode.id: episode for episode in played if "+" not in episode.id}
    for episode in again:
        failed = first[episode.id.partition("+")[0]]
        assert failed.failed
        assert (failed.task, failed.group, failed.iteration) == (episode.task, episode.group, episode.iteration)
    kept = by_group(given)
    assert len(kept) == 12
    assert all(len(found) == 4 and not any(episode.failed for episode in found) for found in kept.values())
    # Members that failed several times were played again several times.
    assert sum(seen["rollout/resampled_members"] for seen in metrics.steps) == len(again)
    assert metrics.steps[-1]["rollout/dropped_groups"] == 0
    none_left_open()


def test_failed_members_are_played_again_at_most_member_rounds_times(model_folder: Path, quiet_trainer: Any) -> None:
    """Half of the tasks can never be played; the others are."""
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    _, played = run(
        model_folder,
        trainer,
        Flaky(10**9, fail_every=2, size=8),
        iterations=2,
        failed_members="resample",
        member_rounds=3,
    )
    failed = [episode for episode in played if episode.failed]
    assert len(failed) == 4 * 4 * (1 + 3), "each of the 4 episodes of 4 tasks, and 3 times again"
    assert len(played) - len(failed) == 16
    assert sum(seen["rollout/dropped_groups"] for seen in metrics.steps) == 4
    none_left_open()


def test_a_run_in_which_all_that_is_played_again_fails_ends_with_the_reason(
    model_folder: Path, quiet_trainer: Any
) -> None:
    with pytest.raises(RolloutError, match=r"every episode of iteration 0 failed, 32 in all.*the back end is away"):
        run(model_folder, quiet_trainer(), Flaky(1), failed_members="resample", member_rounds=1)
    none_left_open()


def test_an_iteration_without_a_whole_group_changes_nothing(model_folder: Path, quiet_trainer: Any) -> None:
    """Every task fails for one of its episodes, and groups with a failed one are left out."""

    class OneOfThem(Flaky):
        def reply(self, message: Message) -> Outcome:
            return EchoEnvironment.reply(self, message)

        def begin(self, task: Task) -> str:
            OneOfThem.begun = getattr(OneOfThem, "begun", 0) + 1
            if OneOfThem.begun % 4 == 0:
                raise OSError("the back end is away")
            return super().begin(task)

    policy = Policy(str(model_folder), learning_rate=1e-3)
    algorithm = GRPO({"main": policy})
    data = RolloutDataModule(
        OneOfThem(),
        groups=2,
        group_size=4,
        iterations=2,
        sampling=Sampling(max_tokens=4),
        retries=0,
        failed_members="drop",
        workers=1,
    )
    before: list[torch.Tensor] = []
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    configure = algorithm.configure_model

    def noting() -> None:
        configure()
        before.extend(weight.detach().clone() for weight in policy.model.parameters())

    algorithm.configure_model = noting  # type: ignore[method-assign]
    trainer.fit(algorithm, data)
    assert [seen["rollout/dropped_groups"] for seen in metrics.steps] == [2, 2]
    assert all(torch.equal(*pair) for pair in zip(before, policy.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("rule", "mode"), [("shrink", "sync"), ("drop", "async"), ("resample", "sync"), ("resample", "async")]
)
@pytest.mark.long_after(2)
def test_turn_trees_with_failing_paths_keep_nothing_open(
    rule: str, mode: str, model_folder: Path, quiet_trainer: Any
) -> None:
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    _, played = run(
        model_folder,
        trainer,
        Flaky(5, turns=2),
        MAGRPO,
        mode=mode,
        iterations=3,
        group_size=3,
        failed_members=rule,
        member_rounds=1,
    )
    trees = by_group(played)
    broken = {
        name for name, found in trees.items() if any(episode.failed for episode in found if "+" not in episode.id)
    }
    assert len(broken) > 0
    again = {episode.group for episode in played if "+" in episode.id}
    assert again == (broken if rule == "resample" else set()), "a tree is played again as a whole"
    if rule == "drop":
        assert sum(seen["rollout/dropped_groups"] for seen in metrics.steps) == len(broken)
    # Four trees of at most nine paths are played at a time, and those of two iterations with a lag of one.
    assert Flaky.most <= 36 * (1 + (mode == "async")), "environments of finished episodes are used again"
    none_left_open()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.long_after(1)
def test_a_run_that_ends_in_the_middle_of_its_episodes_keeps_nothing_open(
    mode: str, model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Poisoned(FlakyLater):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            if "7" in actions["agent"].content:
                return Step(rewards={"agent": float("nan")}, done=True, stop_reason="end")
            return await super().step(actions)

    gc.collect()  # what earlier tests have left
    caplog.clear()
    with pytest.raises(NonFiniteError):
        run(model_folder, quiet_trainer(), Poisoned(3, turns=4), mode=mode, iterations=9, failed_members="resample")
    none_left_open()
    gc.collect()
    assert "never retrieved" not in caplog.text, "the errors of other groups are not reported beside the first"


# Unfinished groups without a collector.


def plan(**rules: Any) -> GroupPlan:
    stream = TaskStream({"a": DatasetTasks("a", "train", [{"n": n} for n in range(9)])}, None, seed=0)
    values = {"lacks_signal": lambda episodes: False, "smallest_group": 2, **rules}
    return GroupPlan(stream, groups=1, group_sizes={"a": 3}, seed=0, **values)


def played(specs: list[EpisodeSpec], failing: str = "") -> list[Episode]:
    """Records of these; ``failing`` has an x for each that fails."""
    marks = failing.ljust(len(specs), ".")
    return [
        Episode(spec.id, spec.task, spec.group, spec.seed, 0, {}, "end", error="away" if mark == "x" else None)
        for spec, mark in zip(specs, marks, strict=True)
    ]


def test_only_what_failed_is_due_again() -> None:
    group = UnfinishedGroup(plan(failed_members="resample", member_rounds=2), 0, 0)
    group.take(played(group.due, "x.x"))
    assert [spec.id for spec in group.due] == ["0-0-0+1", "0-0-2+1"]
    group.take(played(group.due, ".x"))
    assert [spec.id for spec in group.due] == ["0-0-2+2"]
    group.take(played(group.due))
    assert not group.due
    assert [episode.id for episode in group.collected.episodes] == ["0-0-0+1", "0-0-1", "0-0-2+2"]
    assert [episode.id for episode in group.collected.replaced] == ["0-0-0", "0-0-2", "0-0-2+1"]
    assert group.collected.counts == {"resampled_groups": 0, "resampled_members": 3, "dropped_groups": 0}


def test_a_group_that_is_left_out_is_played_with_another_task_if_it_may() -> None:
    group = UnfinishedGroup(plan(resample_rounds=1, failed_members="drop"), 0, 0)
    first = group.due[0].task
    group.take(played(group.due, "x"))
    assert group.due
    assert group.due[0].task != first
    group.take(played(group.due))
    assert not group.due
    assert len(group.collected.episodes) == 3
    assert group.collected.counts == {"resampled_groups": 1, "resampled_members": 0, "dropped_groups": 0}


def test_a_bound_holds_for_each_task_of_a_group() -> None:
    group = UnfinishedGroup(plan(resample_rounds=1, failed_members="resample", member_rounds=1), 0, 0)
    for _ in range(4):  # two tasks, each played and played again
        assert group.due
        group.take(played(group.due, "xxx"))
    assert not group.due
    assert group.collected.episodes == []
    assert len(group.collected.replaced) == 12
    assert group.collected.counts == {"resampled_groups": 1, "resampled_members": 6, "dropped_groups": 1}


@pytest.mark.parametrize("option", [{"failed_members": "keep"}, {"member_rounds": 0}])
def test_values_out_of_range_are_refused(option: dict[str, Any], echo: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"RolloutDataModule: (member_rounds|failed_members) is"):
        RolloutDataModule(echo(), **option)


# Evaluations all of whose episodes fail.


def test_a_validation_loop_of_failures_alone_returns(
    model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Down(Flaky):
        begun = 0

        def begin(self, task: Task) -> str:
            Down.begun += 1
            raise OSError("the back end is away")

    data = RolloutDataModule(Down(), validation_episodes=6, retries=1)
    trainer = quiet_trainer(limit_val_batches=1.0)
    (numbers,) = trainer.validate(GRPO({"main": Policy(str(model_folder))}), data, verbose=False)
    assert numbers["val/failed_episodes"] == 6
    assert math.isnan(numbers["val/reward"])
    assert Down.begun == 12, "each was begun again once"
    assert "6 of 6 validation episodes failed" in caplog.text
    assert "the back end is away" in caplog.text
    none_left_open()


def test_training_goes_on_when_validation_fails(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    """Also with a checkpoint for the best validation, which asks for the number that there is none of."""

    class DownInValidation(Flaky):
        def begin(self, task: Task) -> str:
            if task.split == "validation":
                raise OSError("the back end is away")
            return super().begin(task)

        def reply(self, message: Message) -> Outcome:
            return EchoEnvironment.reply(self, message)

    best = ModelCheckpoint(tmp_path, monitor="val/reward", mode="max")
    trainer = quiet_trainer(
        callbacks=[best], enable_checkpointing=True, limit_val_batches=1.0, val_check_interval=1, max_epochs=1
    )
    run(model_folder, trainer, DownInValidation(), validation_episodes=4)
    assert trainer.global_step == 2


def test_an_iteration_of_which_nothing_is_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_empty([], 7)
    assert "no group of this process is left to learn from in iteration 7" in caplog.text
