"""Episodes that are played while the learner updates: lag, order, waiting, checkpoints."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_environments import CoordinationGame

from mrlm_pl.algorithms import GRPO, MAGRPO, REINFORCE, ReMax
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout import collection
from mrlm_pl.data.rollout.collectors import asynchronous as async_collector
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncCollector, AsyncOptions, Lags, _Group
from mrlm_pl.data.rollout.collectors.groups import Collected
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.environment import Observations, Step
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, NonFiniteError, RolloutError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.rollout.tree_player import Branching
from tests.conftest import EchoEnvironment
from tests.support.runs.short_fits import fingerprint, make
from tests.support.runs.watching import Watch


class Slow(EchoEnvironment):
    """Answers after a time that depends on the task, without blocking anybody."""

    def __init__(self, seconds: float = 0.05, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        return super().reset(task)

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        await asyncio.sleep(self.seconds)
        return super().step(actions)


class WaitForAll(Callback):
    """Lets the groups that were begun be complete before the next update, and before the checkpoint is written."""

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        collector = trainer.datamodule.collection.collector
        while not all(group.collected is not None for group in list(collector._admitted.values())):
            time.sleep(0.01)


def lags_of(episodes: list[Episode], updates: int = 1) -> dict[int, int]:
    """The largest lag by iteration, for a number of updates in each iteration."""
    found: dict[int, int] = {}
    for episode in episodes:
        for row in episode.rows():
            for turn in row.turns:
                for span in turn.token_spans():
                    lag = episode.iteration - span.version // updates
                    found[episode.iteration] = max(found.get(episode.iteration, 0), lag)
    return found


def test_the_lag_never_exceeds_its_bound_and_reaches_it(model_folder: Path, quiet_trainer: Any) -> None:
    for bound in (1, 3):
        algorithm, data = make(model_folder, Slow(0.01), mode="async", max_lag=bound, iterations=8, minibatches=2)
        metrics = Watch()
        trainer = quiet_trainer(callbacks=[WaitForAll(), metrics])
        trainer.fit(algorithm, data)
        assert trainer.global_step == 16
        folder = Path(trainer.default_root_dir) / "episodes"
        episodes = list(read_episodes(folder))
        assert [sum(episode.iteration == n for episode in episodes) for n in range(8)] == [16] * 8
        lags = lags_of(episodes, updates=2)
        assert max(lags.values()) == bound
        assert all(lag <= min(bound, iteration) for iteration, lag in lags.items())
        last = metrics.steps[-1]
        shares = [last[f"async/lag_{lag}"] for lag in range(bound + 1)]
        assert sum(shares) == pytest.approx(1.0)
        assert last["async/lag"] == pytest.approx(sum(lag * share for lag, share in enumerate(shares)), abs=1e-6)
        assert 0 <= last["async/learner_idle"] <= 1
        for path in folder.iterdir():
            path.unlink()


def test_counts_of_all_ranks_are_added_up(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HasDropped(Callback):
        def on_train_start(self, trainer: Any, algorithm: Any) -> None:
            trainer.datamodule.collection.collector._dropped = 3

    monkeypatch.setattr(collection, "gather_ranks", lambda trainer, own: [own, own])
    algorithm, data = make(model_folder, echo(), mode="async", max_lag=1, iterations=2)
    metrics = Watch()
    quiet_trainer(callbacks=[metrics, HasDropped()]).fit(algorithm, data)
    assert [seen["async/dropped_groups"] for seen in metrics.steps] == [6, 0]
    assert [seen["async/lag"] for seen in metrics.steps] == [0, 1], "a mean"


def test_the_lags_of_a_rank_without_episodes_have_no_weight() -> None:
    lags = Lags(1, ["main"])
    lags.published(0, 0)
    assert {weight for _, weight in lags.metrics(0, []).values()} == {0.0}


def test_groups_of_later_iterations_that_are_not_complete_are_in_flight(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = AsyncCollector._play

    async def when_its_iteration_begins(self: AsyncCollector, group: _Group, iteration: int, number: int) -> None:
        while max(self.lags._versions) < iteration:
            await asyncio.sleep(0.005)
        await play(self, group, iteration, number)

    monkeypatch.setattr(AsyncCollector, "_play", when_its_iteration_begins)
    algorithm, data = make(model_folder, echo(), mode="async", max_lag=2, iterations=4)
    metrics = Watch()
    quiet_trainer(callbacks=[metrics]).fit(algorithm, data)
    assert [seen["async/groups_in_flight"] for seen in metrics.steps] == [2 * 4, 2 * 4, 4, 0]


def test_a_lag_of_zero_is_the_synchronous_run(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    prints = []
    for options in ({}, {"mode": "async", "max_lag": 0}):
        algorithm, data = make(model_folder, echo(turns=2), **options)
        quiet_trainer().fit(algorithm, data)
        prints.append(fingerprint(algorithm))
    assert prints[0] == prints[1]


def test_episodes_are_played_while_the_learner_updates(model_folder: Path, quiet_trainer: Any) -> None:
    class Noting(Slow):
        steps = 0

        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            found = await super().step(actions)
            Noting.steps += 1
            return found

    class Update(Callback):
        """An update that lasts until an episode has been stepped meanwhile, or none is under way."""

        overlapped = 0

        def on_train_batch_start(self, *arguments: Any) -> None:
            self.before = Noting.steps

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            groups = trainer.datamodule.collection.collector._admitted
            while Noting.steps == self.before and not all(
                group.collected is not None for group in list(groups.values())
            ):
                time.sleep(0.005)
            self.overlapped += Noting.steps > self.before

    algorithm, data = make(model_folder, Noting(0.3), mode="async", max_lag=1, iterations=4)
    update = Update()
    quiet_trainer(callbacks=[update]).fit(algorithm, data)
    # The first two iterations begin together, and during the last update nothing is left to be played.
    assert update.overlapped >= 2


def test_members_get_the_tasks_and_seeds_of_the_synchronous_run(model_folder: Path, quiet_trainer: Any) -> None:
    found = []
    for mode in ("sync", "async"):
        algorithm, data = make(model_folder, Slow(0.0), mode=mode, max_lag=2)
        trainer = quiet_trainer()
        trainer.fit(algorithm, data)
        folder = Path(trainer.default_root_dir) / "episodes"
        found.append([(e.id, e.task, e.group, e.seed, e.iteration) for e in read_episodes(folder)])
        for path in folder.iterdir():
            path.unlink()
    assert found[0] == found[1]


def test_complete_groups_are_in_the_checkpoint_and_learnt_from_after_a_resume(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, Slow(0.01), mode="async", max_lag=2, iterations=5)
    trainer = quiet_trainer(callbacks=[WaitForAll(), keep], enable_checkpointing=True)
    trainer.fit(algorithm, data)
    folder = Path(trainer.default_root_dir) / "episodes"
    first = {episode.id: episode for episode in read_episodes(folder)}
    for path in folder.iterdir():
        path.unlink()

    algorithm, data = make(model_folder, Slow(0.01), mode="async", max_lag=2, iterations=5)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data, ckpt_path=tmp_path / "step=2.ckpt")
    again = {episode.id: episode for episode in read_episodes(folder)}
    # Two iterations have trained, and the two after them were begun with the weights of the first two.
    assert {episode.iteration for episode in again.values()} == {2, 3, 4}
    for episode in again.values():
        if episode.iteration in (2, 3):
            assert episode == first[episode.id], "to the last digit"
    assert max(lags_of(list(again.values())).values()) <= 2
    assert trainer.global_step == 5


def test_groups_of_a_checkpoint_that_are_too_old_now_are_played_again(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, Slow(0.0), mode="async", max_lag=3, iterations=6)
    quiet_trainer(callbacks=[WaitForAll(), keep], enable_checkpointing=True).fit(algorithm, data)

    algorithm, data = make(model_folder, Slow(0.0), mode="async", max_lag=1, iterations=6)
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data, ckpt_path=tmp_path / "step=2.ckpt")
    # Complete are iterations 2, 3 and 4 (begun with the weights of 0, 0 and 1): lags 2, 3 and 3, four groups each.
    assert [seen["async/dropped_groups"] for seen in metrics.steps] == [12, 0, 0, 0]
    assert all(seen["async/lag"] <= 1 for seen in metrics.steps)
    assert "data.max_lag 1 is less than the lag of 12 groups of the checkpoint, played again" in caplog.text


def test_a_learner_that_waits_in_vain_says_for_what(model_folder: Path, quiet_trainer: Any) -> None:
    options = AsyncOptions()

    class Stuck(Slow):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            object.__setattr__(options, "patience", 0.5)  # only now: a busy machine may have sampled for longer
            await asyncio.sleep(1000)
            raise AssertionError

    algorithm, data = make(model_folder, Stuck(), mode="async", async_options=options, step_timeout=900.0)
    with pytest.raises(RolloutError, match=r"waits for its environment's step for \d+ s.*async_options.patience"):
        quiet_trainer().fit(algorithm, data)
    assert data.collection.collector is None, "nothing continues behind a run that has ended"


def test_a_process_that_was_suspended_has_not_waited(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(ahead=0.0, monotonic=lambda: time.monotonic() + clock.ahead)
    monkeypatch.setattr(async_collector, "time", clock)
    monkeypatch.setattr(async_collector, "_POLL_SECONDS", 0.02)

    class Suspended(Slow):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            await asyncio.sleep(0.2)
            clock.ahead += 10_000.0
            return await super().step(actions)

    algorithm, data = make(model_folder, Suspended(0.2), mode="async", iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.global_step == 1


def test_an_error_that_ends_the_run_is_raised_at_once(model_folder: Path, quiet_trainer: Any) -> None:
    class Broken(Slow):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            step = super(Slow, self).step(actions)
            return Step(step.observations, {"agent": float("nan")}, {}, step.done, step.stop_reason)

    algorithm, data = make(model_folder, Broken(), mode="async")
    with pytest.raises(NonFiniteError):
        quiet_trainer().fit(algorithm, data)


def test_an_engine_that_reads_the_weights_in_place_is_refused(model_folder: Path, echo: Any) -> None:
    with pytest.raises(ConfigurationError, match="own_weights: true"):
        RolloutDataModule(echo(), mode="async", engine=InProcessEngine())
    RolloutDataModule(echo(), mode="async", engine=InProcessEngine(own_weights=True))


@pytest.mark.parametrize("option", [{"mode": "asynchronous"}, {"max_lag": -1}])
def test_values_out_of_range_are_refused(option: dict[str, Any], echo: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"RolloutDataModule: (max_lag|mode) is"):
        RolloutDataModule(echo(), **option)
    for field, value in (("chunk_tokens", 0), ("rows", 0), ("episodes", 0), ("patience", 0.0)):
        with pytest.raises(ConfigurationError, match=field):
            AsyncOptions(**{field: value})


def test_lags_beyond_what_is_remembered_are_too_old() -> None:
    lags = Lags(1, ["main"])
    for iteration in range(20):
        lags.published(iteration, 10 * iteration)
    assert lags.of(19, 185) == 1
    assert lags.of(19, 0) > 1


def test_the_number_of_episodes_at_a_time_is_bounded(model_folder: Path, quiet_trainer: Any) -> None:
    class Counting(Slow):
        now = most = 0

        async def reset(self, task: Task) -> Observations:  # type: ignore[override]
            Counting.now += 1
            Counting.most = max(Counting.most, Counting.now)
            return await super().reset(task)

        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            found = await super().step(actions)
            Counting.now -= 1
            return found

    algorithm, data = make(model_folder, Counting(0.01), mode="async", async_options=AsyncOptions(episodes=5))
    quiet_trainer().fit(algorithm, data)
    assert Counting.most == 5


def test_a_policy_gradient_learns_from_what_is_old(model_folder: Path, quiet_trainer: Any) -> None:
    """The first ratio is one with fresh weights, and is not with old ones."""
    deviations = []
    for lag in (0, 2):
        metrics = Watch()
        algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=3e-3)})
        data = RolloutDataModule(
            Slow(0.0),
            groups=4,
            group_size=4,
            iterations=6,
            sampling=Sampling(max_tokens=6),
            mode="async",
            max_lag=lag,
        )
        quiet_trainer(callbacks=[metrics]).fit(algorithm, data)
        deviations.append(max(seen["train/ratio_deviation"] for seen in metrics.steps))
    assert deviations[0] < 1e-4 < 1e-2 < deviations[1]


def episodes_of(trainer: Any) -> list[Episode]:
    return list(read_episodes(Path(trainer.default_root_dir) / "episodes"))


def test_turn_trees_are_played_meanwhile(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = MAGRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(
        Slow(0.01, turns=2),
        groups=2,
        group_size=3,
        iterations=4,
        sampling=Sampling(max_tokens=5),
        mode="async",
        max_lag=2,
        async_options=AsyncOptions(episodes=3),
    )
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    episodes = episodes_of(trainer)
    assert len(episodes) == 4 * 2 * 9
    assert max(lags_of(episodes).values()) <= 2
    assert trainer.global_step == 4


def test_greedy_baselines_are_played_meanwhile(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = ReMax({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(Slow(0.01), groups=3, group_size=2, iterations=3, mode="async", max_lag=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    greedy = [episode for episode in episodes_of(trainer) if episode.id.endswith("-greedy")]
    assert len(greedy) == 3 * 3
    assert trainer.global_step == 3


def test_groups_that_teach_nothing_are_replaced_meanwhile(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = make(
        model_folder, Slow(0.0, reward=0.5), mode="async", resample_rounds=2, iterations=2, groups=2, group_size=2
    )
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    # All rewards are equal, so each group is played three times, and the last is kept.
    groups = {episode.group for episode in episodes_of(trainer)}
    assert len(groups) == 2 * 2 * 3
    assert metrics.steps[-1]["rollout/resampled_groups"] == 4


def test_failed_episodes_are_records(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, Slow(0.0, fail_every=4), mode="async", iterations=4, retries=1)
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    failed = [episode for episode in episodes_of(trainer) if episode.failed]
    assert failed
    assert all(episode.task.index % 4 == 0 and episode.attempts == 2 for episode in failed)


def test_adapters_and_two_policies_learn_meanwhile(model_folder: Path, quiet_trainer: Any) -> None:
    policies = {name: Policy(str(model_folder), learning_rate=1e-2, lora=LoRA(rank=2)) for name in ("first", "second")}
    algorithm = GRPO(policies, seats={"row": "first", "column": "second"})
    data = RolloutDataModule(
        CoordinationGame(),
        groups=2,
        group_size=4,
        iterations=4,
        sampling=Sampling(max_tokens=4),
        mode="async",
        max_lag=1,
    )
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    assert {row.policy for episode in episodes_of(trainer) for row in episode.rows()} == {"first", "second"}
    assert 0 <= metrics.steps[-1]["async/lag"] <= 1


def test_environments_that_block_take_the_threads_there_are(model_folder: Path, quiet_trainer: Any) -> None:
    class Blocking(EchoEnvironment):
        now = most = 0
        lock, all_busy = threading.Lock(), threading.Event()

        def __deepcopy__(self, memo: Any) -> Any:
            return Blocking()

        def reply(self, message: Message) -> Any:
            with Blocking.lock:
                Blocking.now += 1
                Blocking.most = max(Blocking.most, Blocking.now)
                if Blocking.now == 3:
                    Blocking.all_busy.set()
            Blocking.all_busy.wait(60)
            time.sleep(0.01)
            with Blocking.lock:
                Blocking.now -= 1
            return super().reply(message)

    algorithm, data = make(model_folder, Blocking(), mode="async", workers=3)
    quiet_trainer().fit(algorithm, data)
    assert Blocking.most == 3


def test_validation_is_of_the_current_weights(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, data = make(model_folder, Slow(0.01), mode="async", max_lag=2, validation_episodes=8)
    trainer = quiet_trainer(limit_val_batches=1.0, val_check_interval=1)
    seen: list[tuple[int, int]] = []
    play = Players.play

    def noting(self: Players, specs: Any, sampling: Any) -> Any:
        episodes = play(self, specs, sampling)
        seen.extend((trainer.global_step, turn.version) for e in episodes for row in e.rows() for turn in row.turns)
        return episodes

    monkeypatch.setattr(Players, "play", noting)
    trainer.fit(algorithm, data)
    assert len(seen) == 3 * 8
    assert all(step == version for step, version in seen)


@pytest.mark.parametrize("algorithm", [REINFORCE, GRPO])
def test_a_loss_that_takes_old_data_for_its_own_is_warned_of(
    algorithm: Any, model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = RolloutDataModule(Slow(0.0), groups=2, group_size=2, iterations=1, mode="async")
    quiet_trainer().fit(algorithm({"main": Policy(str(model_folder))}), data)
    assert ("stale as on-policy" in caplog.text) == (algorithm is REINFORCE)


def test_groups_are_played_again_when_what_they_were_played_with_has_changed(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, Slow(0.0), mode="async", max_lag=1, iterations=3)
    trainer = quiet_trainer(callbacks=[WaitForAll(), keep], enable_checkpointing=True)
    trainer.fit(algorithm, data)
    folder = Path(trainer.default_root_dir) / "episodes"

    warm = Sampling(temperature=0.5, max_tokens=6)
    for options in ({"mode": "async", "sampling": warm, "group_size": 2}, {"mode": "sync"}):
        for path in folder.iterdir():
            path.unlink()
        caplog.clear()
        algorithm, data = make(model_folder, Slow(0.0), iterations=3, **options)
        metrics = Watch()
        quiet_trainer(callbacks=[metrics]).fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
        assert "4 groups of the checkpoint" in caplog.text
        assert "of the checkpoint again" in caplog.text
        if options["mode"] == "async":
            assert "data.group_size, data.sampling changed" in caplog.text
            assert metrics.steps[0]["async/dropped_groups"] == 4
            again = list(read_episodes(folder))
            assert len(again) == 2 * 4 * 2, "none of the larger groups of the checkpoint"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"unit": SimpleNamespace(branching=Branching("cross"), branch_rule=0)}, "the turn tree changed"),
        ({"unit": SimpleNamespace(branching=None, branch_rule=0)}, "the turn tree changed"),
        ({"uses_greedy_baseline": True}, "the greedy baseline changed"),
        (
            {"unit": SimpleNamespace(branching=Branching("align"), branch_rule=2), "seat": "critic".join},
            "model.seats, the branch episodes changed",
        ),
    ],
)
def test_what_decides_the_episodes_of_a_group_is_compared_with_the_checkpoint(
    change: dict[str, Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def collector(**changed: Any) -> AsyncCollector:
        unit = SimpleNamespace(branching=Branching("align"), branch_rule=0)
        own = {"unit": unit, "uses_greedy_baseline": False}
        made = object.__new__(AsyncCollector)
        made.plan = SimpleNamespace(made_with=lambda: {"data.groups": "4"})  # type: ignore[assignment]
        made.sampling, made.max_lag, made.options, made._admitted = Sampling(), 1, AsyncOptions(), {}
        learner = SimpleNamespace(**{"seat": str, **own, **changed})
        environments = {"echo": SimpleNamespace(agents=("agent",))}
        made.players = SimpleNamespace(environments=environments, learner=learner)  # type: ignore[assignment]
        made.lags = SimpleNamespace(load=lambda _: None, state=list, exceeded=lambda *_: False)  # type: ignore[assignment]
        return made

    before, after = collector(), collector(**change)
    played = Episode("0", Task("echo", "train", 0, 0, {}), "g", 0, 0, {}, "done")
    before._admitted[4, 0] = _Group(collected=Collected([played]))
    after.load(before.state())
    assert [*after._admitted] == ([] if told else [(4, 0)])
    assert (f"playing 1 group of the checkpoint again: {told}" in caplog.text) == (told is not None)


def test_nobody_finds_the_environment_closed_when_another_episode_ends_the_run(
    model_folder: Path, quiet_trainer: Any
) -> None:
    class Fragile(Slow):
        steps = 0
        found_closed = 0
        closed = False

        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            Fragile.steps += 1
            if Fragile.steps == 1:
                step = super(Slow, self).step(actions)
                return Step(step.observations, {"agent": float("nan")}, {}, step.done, step.stop_reason)
            await asyncio.sleep(0.3)
            Fragile.found_closed += self.closed
            return super(Slow, self).step(actions)

        async def close(self) -> None:  # type: ignore[override]
            self.closed = True
            await asyncio.sleep(1.0)

    algorithm, data = make(model_folder, Fragile(), mode="async", groups=1)
    with pytest.raises(NonFiniteError):
        quiet_trainer().fit(algorithm, data)
    assert Fragile.found_closed == 0


def test_a_long_turn_is_no_standstill(model_folder: Path, quiet_trainer: Any) -> None:
    class Lengthy(InProcessEngine):
        """Ends no turn early, and takes its time."""

        async def sample(self, requests: Any) -> Any:
            await asyncio.sleep(0.1)
            samples = await super().sample([replace(request, stop_ids=()) for request in requests])
            stops = requests[0].stop_ids
            other = min(set(range(9)) - {*stops})
            return [replace(one, token_ids=[other if id in stops else id for id in one.token_ids]) for one in samples]

    algorithm, data = make(
        model_folder,
        Slow(0.0),
        mode="async",
        iterations=1,
        engine=Lengthy(own_weights=True),
        sampling=Sampling(max_tokens=32),
        async_options=AsyncOptions(chunk_tokens=1, patience=2.0),
    )
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert all(turn.stop - turn.start == 32 for e in episodes_of(trainer) for row in e.rows() for turn in row.turns)


def test_a_second_fit_plays_ahead_as_well_and_no_further_than_it_goes(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, data = make(model_folder, Slow(0.0), mode="async", max_lag=1, iterations=4)
    begun = []
    collect = AsyncCollector.collect

    def noting(collector: AsyncCollector, iteration: int, last: int, groups: Any) -> Any:
        begun.append(last)
        return collect(collector, iteration, last, groups)

    monkeypatch.setattr(AsyncCollector, "collect", noting)
    quiet_trainer().fit(algorithm, data)
    quiet_trainer(limit_train_batches=2, max_epochs=2).fit(algorithm, data)
    quiet_trainer(max_steps=3).fit(algorithm, data)
    assert begun == [1, 2, 3, 3, 5, 6, 7, 7, 9, 10, 10]


def test_what_cannot_be_closed_keeps_nothing_else_open(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, EchoEnvironment(), mode="async")
    before = set(threading.enumerate())  # other tests of this process may have left loops
    trainer = quiet_trainer(callbacks=[CloseFails()])
    with pytest.raises(OSError, match="cannot be closed"):
        trainer.fit(algorithm, data)
    assert data.players._own is None
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "mrlm-event-loop"]


class CloseFails(Callback):
    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        def close() -> None:
            raise OSError("cannot be closed")

        trainer.datamodule.collection.collector.training_player.close = close


def test_an_environment_that_blocks_the_event_loop_is_found(model_folder: Path, quiet_trainer: Any) -> None:
    class Blocks(Slow):
        blocked = False

        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            if not Blocks.blocked:
                Blocks.blocked = True
                time.sleep(6.0)  # not awaited: no deadline on the loop can see it
            return await super().step(actions)

    algorithm, data = make(model_folder, Blocks(0.0), mode="async", async_options=AsyncOptions(patience=3.0))
    with pytest.raises(RolloutError, match=r"event loop has stood still for 3 s in step .*test_asynchronous.py:\d+"):
        quiet_trainer().fit(algorithm, data)
    assert data.collection.collector is None


def test_a_run_whose_loop_is_blocked_can_be_saved(model_folder: Path, quiet_trainer: Any) -> None:
    blocked, saved = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    blocked_until_saved: list[bool] = []

    class Plays(Slow):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            loops.append(asyncio.get_running_loop())
            return await super().step(actions)

    def block() -> None:
        blocked.set()
        blocked_until_saved.append(saved.wait(60))

    class Saves(Callback):
        state: dict[str, Any] | None = None

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if self.state is None:
                loops[-1].call_soon_threadsafe(block)
                assert blocked.wait(60)
                self.state = data.state_dict()
                saved.set()

    saver = Saves()
    algorithm, data = make(model_folder, Plays(0.2), mode="async", iterations=3)
    quiet_trainer(callbacks=[saver]).fit(algorithm, data)
    assert saver.state is not None
    assert 1 <= saver.state["iteration"] < 3
    assert blocked_until_saved == [True], "the loop stood still until the state was saved"


def test_the_rate_of_a_resumed_run_leaves_out_what_was_sampled_before(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, Slow(0.0), mode="async", iterations=3)
    quiet_trainer(enable_checkpointing=True, callbacks=[WaitForAll(), saver]).fit(algorithm, data)
    metrics = Watch()
    algorithm, data = make(model_folder, Slow(0.0), mode="async", iterations=3)
    quiet_trainer(callbacks=[metrics]).fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert metrics.steps[0]["rollout/tokens_per_second"] == 0.0, "the whole iteration was in the checkpoint"
    assert metrics.steps[1]["rollout/tokens_per_second"] > 0.0


def test_a_token_budget_holds_for_turns_in_chunks(model_folder: Path, quiet_trainer: Any) -> None:
    sampling = Sampling(max_tokens=12, max_context=24)
    options = {"mode": "async", "async_options": AsyncOptions(chunk_tokens=3), "sampling": sampling, "iterations": 2}
    trainer = quiet_trainer()
    trainer.fit(*make(model_folder, Slow(0.0, turns=6), **options))
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    stops = [row.turns[-1].stop for episode in episodes for row in episode.rows()]
    assert max(stops) == 24
    assert {episode.stop_reason for episode in episodes} == {"context_window"}


def test_the_rate_is_that_of_the_last_iterations(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, updates = [0.0], iter([1.0, 1.0, 1.0, 10.0, 10.0, 10.0])

    def monotonic() -> float:
        now[0] += 1e-6
        return now[0]

    class Passes(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            now[0] += next(updates)

    monkeypatch.setattr(async_collector, "time", SimpleNamespace(monotonic=monotonic))
    algorithm, data = make(model_folder, Slow(0.0), mode="async", iterations=6)
    metrics, trainer = Watch(), quiet_trainer(callbacks=[])
    trainer.callbacks = [metrics, Passes(), *trainer.callbacks]
    trainer.fit(algorithm, data)
    tokens = Counter[int]()
    for episode in read_episodes(Path(trainer.default_root_dir) / "episodes"):
        tokens[episode.iteration] += sum(row.num_actions for row in episode.rows())
    rates = [step["rollout/tokens_per_second"] for step in metrics.steps]
    assert rates[2] == pytest.approx((tokens[1] + tokens[2]) / 2.0, rel=1e-3)
    assert rates[5] == pytest.approx((tokens[4] + tokens[5]) / 20.0, rel=1e-3), "max_lag is 1: two iterations"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_lag": 2}, True),
        ({"async_options": AsyncOptions(chunk_tokens=8)}, True),
        ({}, False),
        ({"max_lag": 0}, False),
        ({"mode": "async", "max_lag": 2}, False),
    ],
)
def test_options_without_effect_are_told(
    options: dict[str, Any], told: bool, model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_trainer().fit(*make(model_folder, Slow(0.0), iterations=1, **options))
    assert ("data.max_lag and data.async_options have no effect in data.mode sync" in caplog.text) == told


def test_a_group_that_fails_leaves_no_greedy_episode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_collector, "UnfinishedGroup", lambda *key: SimpleNamespace(due=True))

    class Failing(AsyncCollector):
        def __init__(self) -> None:
            self.plan = None  # type: ignore[assignment]

        async def play_greedy(self, iteration: int, groups: Any) -> Any:
            await asyncio.sleep(600)

        async def play_due(self, unfinished: Any) -> None:
            await asyncio.sleep(0)
            raise RolloutError("no such task")

    async def play() -> set[Any]:
        with pytest.raises(RolloutError, match="no such task"):
            await Failing()._play(_Group(), 0, 0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(play()) == set()


def test_groups_that_failed_as_a_whole_are_played_again_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server whose end ended the run has failed the groups played ahead too."""
    collector = object.__new__(AsyncCollector)
    collector.lags = SimpleNamespace(state=list)  # type: ignore[assignment]
    monkeypatch.setattr(collector, "_made_with", dict)
    task = Task("echo", "train", 0, 0, {})
    failed = Episode("0", task, "g", 0, 0, {}, "error", error="away")
    groups = ([failed, failed], [failed, replace(failed, error=None)], [replace(failed, error=None)])
    collector._admitted = {(4, number): _Group(collected=Collected(list(own))) for number, own in enumerate(groups)}
    collector._admitted[5, 0] = _Group()
    assert [key for *key, _, _, _, _, _ in collector.state()["complete"]] == [[4, 1], [4, 2]]
