"""Records hold the credit that their turns were trained with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import LengthRatioGame

from mrlm_pl.algorithms import COMA, GRPO, IPPO, MAGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.tasks.environments import TaskSettings
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.replay import differences


def collected(algorithm: Any, environment: Any, quiet_trainer: Any, **settings: Any) -> list[Episode]:
    data = RolloutDataModule(
        environment, groups=2, group_size=4, iterations=1, sampling=Sampling(max_tokens=6), **settings
    )
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(algorithm, data)
    return list(read_episodes(Path(trainer.default_root_dir) / "episodes"))


def policy(model: Path) -> dict[str, Policy]:
    return {"main": Policy(str(model), learning_rate=1e-3)}


def test_advantages_are_those_of_the_groups_returns(model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    episodes = collected(GRPO(policy(model_folder)), echo(), quiet_trainer)
    assert len(episodes) == 8
    for group in {episode.group for episode in episodes}:
        rewards = torch.tensor([e.reward for e in episodes if e.group == group], dtype=torch.float64)
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        turns = [turn for e in episodes if e.group == group for row in e.rows() for turn in row.turns]
        assert len(turns) == 4
        assert [turn.advantage for turn in turns] == pytest.approx(expected.tolist(), abs=1e-6)
        assert all(turn.baseline is None for turn in turns)


def test_rewards_of_the_record_are_the_environments_where_the_learner_scales_them(
    model_folder: Path, quiet_trainer: Any, echo: Any
) -> None:
    scaled = {"task_settings": {"echo": TaskSettings(reward_scale=3.0)}}
    algorithm = GRPO(policy(model_folder), advantage="group_centered")
    episodes = collected(algorithm, echo(), quiet_trainer, **scaled)
    for episode in episodes:
        mean = sum(e.reward for e in episodes if e.group == episode.group) / 4
        (turn,) = episode.rows()[0].turns
        assert turn.reward == episode.reward
        assert turn.advantage == pytest.approx(3 * (episode.reward - mean), abs=1e-6)


def test_a_critic_gives_a_baseline(model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    algorithm = IPPO(policy(model_folder))
    seen: list[Any] = []
    prepare = algorithm.prepare

    def look(*arguments: Any) -> Any:
        seen.append(prepare(*arguments))
        return seen[0]

    algorithm.prepare = look  # type: ignore[method-assign]
    (turn, *_) = [turn for e in collected(algorithm, echo(), quiet_trainer) for row in e.rows() for turn in row.turns]
    rows = seen[0]["main"]
    span = slice(turn.start, turn.stop)
    assert turn.baseline == pytest.approx(float(rows.values[0, span].mean()), abs=1e-6)
    assert turn.advantage == pytest.approx(float(rows.advantages[0, span].mean()), abs=1e-6)


def test_turns_whose_rewards_the_algorithm_changes_have_credit(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = collected(IPPO(policy(model_folder), reward="team"), LengthRatioGame(rounds=2), quiet_trainer)
    turns = [turn for episode in episodes for row in episode.rows() for turn in row.turns]
    assert len(turns) == 8 * 2 * 2
    assert all(turn.advantage is not None and turn.baseline is not None for turn in turns)


@pytest.mark.parametrize("algorithm", [MAGRPO, COMA])
def test_paths_of_a_turn_tree_share_the_credit_of_their_decisions(
    algorithm: Any, model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = collected(algorithm(policy(model_folder)), LengthRatioGame(rounds=2), quiet_trainer)
    credit: dict[tuple[str, str, str, int], set[float | None]] = {}
    for episode in episodes:
        for row in episode.rows():
            for turn in row.turns:
                credit.setdefault((episode.group, turn.node, turn.agent, turn.sample), set()).add(turn.advantage)
    assert len(credit) > 8
    assert all(len(values) == 1 for values in credit.values())
    assert any(value for values in credit.values() for value in values)


def test_records_without_credit_are_read_and_credit_is_no_difference(
    model_folder: Path, quiet_trainer: Any, echo: Any
) -> None:
    episode = collected(GRPO(policy(model_folder)), echo(), quiet_trainer)[0]
    old = json.loads(episode.to_json())
    for row in (row for rows in old["trajectories"].values() for row in rows):
        for turn in row["turns"]:
            del turn["advantage"], turn["baseline"]
    plain = Episode.from_dict(old)
    assert plain.rows()[0].turns[0].advantage is None
    assert differences(plain, dataclasses.replace(episode, id="again")) == []
