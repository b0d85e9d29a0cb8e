"""The collection of a fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.data.rollout import collection as collecting
from mrlm_pl.data.rollout.collection import RolloutCollection, check_played, first_failure
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.data.rollout.collectors.groups import Collected, GroupPlan, SyncCollector
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task
from mrlm_pl.episode_files import EpisodeRetention
from mrlm_pl.errors import RolloutError
from mrlm_pl.learner.credit.decisions import TreeCredit
from mrlm_pl.learner.credit.returns import EpisodeCredit
from mrlm_pl.learner.token_measures import TokenMeasures
from tests.conftest import EchoEnvironment


@pytest.mark.parametrize(("rank", "names"), [(0, ["episodes", "tokens"]), (1, [])])
def test_one_of_the_tensor_parallel_ranks_writes_their_episodes(
    rank: int, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with the same episodes would replace the draft of each other's file."""
    share = SimpleNamespace(distributed_sampler_kwargs={"rank": 0, "num_replicas": 1})
    trainer = SimpleNamespace(
        world_size=2, global_rank=rank, strategy=share, received_sigterm=False, default_root_dir=tmp_path
    )
    environments = {"echo": EchoEnvironment()}
    stream = SimpleNamespace(plan_until=lambda *_: None, state=dict)
    parts: Any = SimpleNamespace(stream=stream, stale=None, groups=1, environments=environments)
    plan = GroupPlan(parts, groups=1, group_sizes={"echo": 2}, seed=0)
    collection = RolloutCollection(parts, parts, plan, Sampling(), None, 0, AsyncOptions(), EpisodeRetention())
    measures = TokenMeasures(0, {})
    learner: Any = SimpleNamespace(trainer=trainer, metrics=SimpleNamespace(tokens=measures))
    learner.smallest_group, learner.unit, learner.no_signal_reason = 2, EpisodeCredit(), ""
    collection.begin(learner)
    task = Task("echo", "train", 0, 0, {})
    failed = Episode("1-0-0", task, "1-0", 0, 1, trajectories={}, stop_reason="error", error="away")
    monkeypatch.setattr(collecting, "gather_ranks", lambda trainer, own: [own])
    collection.collector = SimpleNamespace(collect=lambda *_: Collected([failed]))  # type: ignore[assignment]
    with pytest.raises(RolloutError, match="every episode"):  # they are written all the same
        collection.collect(1, 1)
    collection._writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_groups_that_play_on_keep_the_rules_of_their_algorithm_when_another_one_begins() -> None:
    """Threads of an asynchronous collector may ask after the next fit has begun."""
    parts: Any = SimpleNamespace(state=dict, stale=None, with_reward_scale=list)
    parts.stream = parts
    plan = GroupPlan(parts, groups=1, group_sizes={"echo": 4}, seed=0)
    collection = RolloutCollection(parts, parts, plan, Sampling(), None, 0, AsyncOptions(), None)
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": 0, "num_replicas": 1})
    trainer = SimpleNamespace(world_size=1, global_rank=0, strategy=strategy)
    plans = []
    for smallest, unit in ((2, EpisodeCredit()), (3, TreeCredit())):
        learner: Any = SimpleNamespace(trainer=trainer, smallest_group=smallest, unit=unit, no_signal_reason="")
        learner.lacks_signal = lambda group, smallest=smallest: smallest == 2
        collection.begin(learner)
        assert collection.collector is not None
        plans.append(collection.collector.plan)
    assert [(plan.smallest_group, plan.trees, plan.lacks_signal([])) for plan in plans] == [
        (2, False, True),
        (3, True, False),
    ]


def test_a_collector_can_be_shown_before_it_has_players() -> None:
    parts: Any = SimpleNamespace()
    assert "SyncCollector" in repr(SyncCollector(parts, parts, Sampling()))


def test_a_failing_environment_is_checked_by_the_run_that_records_it_else_in_python(tmp_path: Path) -> None:
    failed = Episode("0-0-0", Task("echo", "train", 0, 0, {}), "0-0", 0, 0, {}, "error", error="away")
    assert first_failure([failed], tmp_path) == "away; try `mrlm_pl.check_environment(environment)`"
    run = tmp_path / "a run"
    run.mkdir()
    (run / "config.yaml").touch()
    assert first_failure([failed], run) == f"away; try `mrlm check-env --model '{run}'`"


@pytest.mark.parametrize(("ranks", "where"), [(2, " on rank 1"), (1, "")])
def test_the_rank_whose_episodes_all_failed_is_named(
    ranks: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all ranks: the error of the others was a closed connection, which the run's state recorded."""
    monkeypatch.setattr(collecting, "gather_ranks", lambda trainer, own: [(None, {"t"}), (own[0] or told, set())])
    told: Any = None
    trainer = SimpleNamespace(world_size=ranks, global_rank=1, default_root_dir=str(tmp_path))
    failed = Episode("0", Task("t", "train", 0), "g", 0, 0, {}, "", error="away")
    with pytest.raises(
        RolloutError, match=f"every episode of iteration 3{where} failed, 1 in all; the first: away; try"
    ) as error:
        check_played([failed], 3, trainer)
    assert check_played([replace(failed, error=None)], 3, trainer) == {"t"}
    told, trainer.global_rank = str(error.value), 0
    with pytest.raises(RolloutError, match=re.escape(told)):
        check_played([replace(failed, error=None)], 3, trainer)
