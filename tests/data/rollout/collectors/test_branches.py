"""Groups with branch episodes, in collections of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data.rollout.collectors.groups import Collected, UnfinishedGroup
from mrlm_pl.data.rollout.metrics import token_count
from mrlm_pl.environment import Outcome
from mrlm_pl.episode import Episode, Message, Origin, Task
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.learner.credit.returns import EpisodeCredit
from mrlm_pl.rollout.branches import BranchRule, Expansions
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments.service import Limits
from mrlm_pl.serving.server import EnvironmentServer
from tests.conftest import EchoEnvironment
from tests.data.rollout.collectors.test_asynchronous import Slow, WaitForAll
from tests.data.rollout.collectors.test_failed_members import plan, played
from tests.support.runs.short_fits import fingerprint, make
from tests.support.runs.watching import Watch
from tests.support.servers.environment_servers import Served, eventually, offer


class Copies(BranchRule):
    """A copy of each episode of a group in each of two rounds."""

    def due(self, group: Sequence[Episode], rounds: int) -> Sequence[EpisodeSpec]:
        self.seen = [episode.id for episode in group]
        origins = [episode for episode in group if episode.origin is None] if rounds < 2 else []
        return [EpisodeSpec(f"{e.id}/{rounds}", e.task, e.group, 1, origin=Origin(e.id, ("a",), 0)) for e in origins]


def branched(specs: list[EpisodeSpec]) -> list[Episode]:
    return [Episode(spec.id, spec.task, spec.group, spec.seed, 0, {}, "end", origin=spec.origin) for spec in specs]


def test_rounds_follow_the_ordinary_episodes_and_come_before_another_task() -> None:
    rule = Copies()
    signals: list[int] = []

    def silent(group: Sequence[Episode]) -> bool:
        signals.append(len(group))
        return len(signals) == 1

    options = {"failed_members": "resample", "resample_rounds": 1, "lacks_signal": silent}
    group = UnfinishedGroup(plan(branch_rule=rule, **options), 0, 0)
    group.take(played(group.due, "x"))
    group.take(played(group.due))
    for rounds in range(2):
        assert [spec.id for spec in group.due] == [f"{name}/{rounds}" for name in ("0-0-0+1", "0-0-1", "0-0-2")]
        group.take(branched(group.due))
    assert rule.seen[:3] == ["0-0-0+1", "0-0-1", "0-0-2"]
    assert group.due, "the group has no signal"
    while group.due:
        specs = group.due
        group.take(branched(specs) if specs[0].origin else played(specs))
    assert signals == [9], "three episodes and two branches of each; the last task is kept in any case"
    collected = group.collected
    assert [episode.id for episode in collected.episodes] == ["0-0.1-0", "0-0.1-1", "0-0.1-2"]
    assert len(collected.branches) == 12
    assert len(collected.training) == 9
    assert {episode.group for episode in collected.training} == {"0-0.1"}
    assert Collected.from_plain(*collected.to_plain()) == collected


def test_a_group_that_is_left_out_has_no_branch_episodes() -> None:
    group = UnfinishedGroup(plan(branch_rule=Copies(), failed_members="drop"), 0, 0)
    group.take(played(group.due, "x"))
    assert not group.due
    assert not group.collected.branches


class Expanding(EpisodeCredit):
    """Whole episodes, beside those of expanded trees."""

    branch_rule = Expansions(rounds=2, nodes=1)


def expanding(model_folder: Path, environment: Any, **options: Any) -> Any:
    algorithm, data = make(model_folder, environment, groups=2, group_size=2, iterations=3, **options)
    algorithm.unit = Expanding()
    return algorithm, data


@pytest.mark.parametrize("options", [{}, {"mode": "async", "max_lag": 1}, {"processes": 2}])
@pytest.mark.long_after(1)
def test_branch_episodes_train_and_are_counted_apart(
    model_folder: Path, quiet_trainer: Any, options: dict[str, Any]
) -> None:
    environment = Slow(0.0, turns=3) if "mode" in options else EchoEnvironment(turns=3)
    algorithm, data = expanding(model_folder, environment, **options)
    trained: list[list[Episode]] = []
    prepare = algorithm.prepare
    algorithm.prepare = lambda episodes, *rest: trained.append(episodes) or prepare(episodes, *rest)
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    last = [episode for episode in episodes if episode.iteration == 2]
    ordinary = [episode for episode in last if episode.origin is None]
    branches = [episode for episode in last if episode.origin is not None]
    assert (len(ordinary), len(branches)) == (4, 8)
    logged = metrics.steps[-1]
    assert logged["rollout/branch_episodes"] == 8
    own = sum(turn.stop - turn.start for e in branches for r in e.rows() for turn in r.turns if not turn.scripted)
    assert logged["rollout/branch_tokens"] == own
    assert 0 < own < sum(row.num_actions for episode in branches for row in episode.rows())
    assert logged["rollout/reward"] == pytest.approx(sum(episode.reward for episode in ordinary) / 4)
    assert logged["progress/generated_tokens"] == token_count(episodes)
    assert logged["progress/episodes"] == 36
    assert [episode.id for episode in trained[-1]] == [episode.id for episode in last]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.long_after(1)
def test_a_resumed_run_has_the_same_branch_episodes(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, mode: str
) -> None:
    """Between mini-batches of a rollout, and with groups that were played ahead."""

    def run(**options: Any) -> tuple[str, dict[str, Episode]]:
        algorithm, data = expanding(model_folder, Slow(0.0, turns=2), mode=mode, max_lag=1, minibatches=2)
        trainer = quiet_trainer(**options.pop("trainer", {}))
        trainer.fit(algorithm, data, **options)
        folder = Path(trainer.default_root_dir) / "episodes"
        found = {episode.id: episode for episode in read_episodes(folder)}
        for path in folder.iterdir():
            path.unlink()
        return fingerprint(algorithm), found

    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [WaitForAll(), keep] if mode == "async" else [keep]
    whole, episodes = run(trainer={"callbacks": callbacks, "enable_checkpointing": True})
    again, rest = run(ckpt_path=tmp_path / "step=3.ckpt")
    assert again == whole
    ahead = [episode for episode in rest.values() if episode.iteration == 2]
    assert sum(episode.origin is not None for episode in ahead) == 8
    if mode == "async":
        assert all(episode == episodes[episode.id] for episode in ahead), "from the checkpoint, to the last digit"


class FailsSometimes(EchoEnvironment):
    """Fail in the second turn after every third first turn, in all copies together."""

    begun = itertools.count()

    def begin(self, task: Task) -> str:
        self.fails = next(self.begun) % 3 == 2
        return super().begin(task)

    def reply(self, message: Message) -> Outcome:
        if self.fails and self.left == 1:
            raise OSError("the back end is away")
        return super().reply(message)


def test_a_branch_that_fails_is_a_record(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm, data = expanding(model_folder, FailsSometimes(turns=2), retries=0)
    metrics = Watch()
    trainer = quiet_trainer(callbacks=[metrics])
    trainer.fit(algorithm, data)
    failed = [e for e in read_episodes(Path(trainer.default_root_dir) / "episodes") if e.failed and e.iteration == 2]
    assert any(episode.origin is not None for episode in failed)
    assert any(episode.origin is None for episode in failed)
    assert metrics.steps[-1]["rollout/failed_episodes"] == len(failed)
    assert trainer.global_step == 3


@pytest.mark.long
def test_environments_behind_grpc_are_branched_alike(model_folder: Path, quiet_trainer: Any) -> None:
    loop = EventLoopThread()
    server = EnvironmentServer(offer(more={"echo": lambda settings: EchoEnvironment(turns=3)}), limits=Limits())
    loop.submit(server.start()).result(20)
    served = Served(server, loop)
    found = []
    try:
        for environment in (EchoEnvironment(turns=3), RemoteEnvironment(served.target, "echo")):
            algorithm, data = expanding(model_folder, environment)
            trainer = quiet_trainer()
            trainer.fit(algorithm, data)
            folder = Path(trainer.default_root_dir) / "episodes"
            found.append([(episode.id, episode.trajectories, episode.origin) for episode in read_episodes(folder)])
            for path in folder.iterdir():
                path.unlink()
        eventually(lambda: served.live == 0)
    finally:
        served.stop()
    assert found[0] == found[1]
    assert sum(origin is not None for _, _, origin in found[0]) == 3 * 8
