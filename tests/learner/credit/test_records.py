"""Records hold the credit that their turns were trained with."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import LengthRatioGame

from mrlm_pl.algorithms import (
    CCPO,
    COMA,
    GDPO,
    GRPO,
    IPPO,
    MAGRPO,
    RAE,
    REINFORCE,
    RLOO,
    SHARP,
    DrMAS,
    GiGPO,
    REINFORCEPlusPlus,
    ReMax,
    TreeGRPO,
)
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.tasks import TaskSettings
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.learner.credit.records import credited
from mrlm_pl.learner.credit.returns import EpisodeCredit
from mrlm_pl.learner.token_measures import TokenMeasures
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.replay import differences
from tests.support.runs.turn_episodes import episode as played_episode


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
        assert [turn.return_ for turn in turns] == rewards.tolist()
        assert [turn.baseline for turn in turns] == pytest.approx([float(rewards.mean())] * 4)


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
    assert turn.return_ == pytest.approx(float(rows.returns[0, span].mean()), abs=1e-6)


def test_turns_whose_rewards_the_algorithm_changes_have_credit(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = collected(IPPO(policy(model_folder), reward="team"), LengthRatioGame(rounds=2), quiet_trainer)
    turns = [turn for episode in episodes for row in episode.rows() for turn in row.turns]
    assert len(turns) == 8 * 2 * 2
    assert all(None not in (turn.return_, turn.baseline, turn.advantage) for turn in turns)


class Halved(GRPO):
    """Compares with no group."""

    def advantages(self, returns: Any) -> Any:
        return returns.reward / 2


@dataclasses.dataclass
class Above:
    """A rule that no table can have as a key: with ``eq`` it has no hash."""

    level: float

    def __call__(self, rewards: Any, groups: Any) -> Any:
        return rewards - self.level


REWARDS = {"g": [[1.0, 2.0], [3.0], [2.0, 0.0, 4.0]], "h": [[8.0], [6.0]]}
"""Of the turns of an agent in the episodes of two tasks: returns 3, 3, 6 and 8, 6."""


@pytest.mark.parametrize(
    ("algorithm", "returns", "baselines"),
    [
        (lambda own: GRPO(own), [3, 3, 3, 6, 6, 6, 8, 6], [4, 4, 4, 4, 4, 4, 7, 7]),
        (lambda own: RLOO(own), [3, 3, 3, 6, 6, 6, 8, 6], [4.5, 4.5, 4.5, 3, 3, 3, 6, 8]),
        # Agents count in each step: (2 * 3 + 1 * 3 + 3 * 6) / 6.
        (lambda own: DrMAS(own), [3, 3, 3, 6, 6, 6, 8, 6], [4.5, 4.5, 4.5, 4.5, 4.5, 4.5, 7, 7]),
        (lambda own: ReMax(own), [3, 3, 3, 6, 6, 6, 8, 6], [2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 7.5, 7.5]),
        (lambda own: REINFORCE(own), [3, 3, 3, 6, 6, 6, 8, 6], [26 / 5] * 8),
        # The baseline of the role before each episode: 0, then half of it and half of the return.
        (
            lambda own: RAE(own, baseline_decay=0.5),
            [3, 3, 3, 6, 6, 6, 8, 6],
            [0, 0, 1.5, 2.25, 2.25, 2.25, 4.125, 6.0625],
        ),
        (lambda own: GDPO(own), [3, 3, 3, 6, 6, 6, 8, 6], [None] * 8),
        (lambda own: Halved(own), [3, 3, 3, 6, 6, 6, 8, 6], [None] * 8),
        (lambda own: GRPO(own, advantage=Above(4.0)), [3, 3, 3, 6, 6, 6, 8, 6], [None] * 8),
        # The same turn in the other episodes, 0 in one that has ended.
        (lambda own: GRPO(own, credit="turn", gamma=0.5), [2, 2, 3, 3, 2, 4, 8, 6], [3, 1, 2.5, 2.5, 1, 0, 6, 8]),
        (lambda own: GiGPO(own, gamma=0.5), [2, 2, 3, 3, 2, 4, 8, 6], [None] * 8),
        (lambda own: TreeGRPO(own), [3, 3, 3, 6, 6, 6, 8, 6], [4.5, 4.5, 4.5, 3, 3, 3, 6, 8]),
        # Returns of tokens, of which a turn has one: their mean whitens them.
        (lambda own: REINFORCEPlusPlus(own), [3, 2, 3, 6, 4, 4, 8, 6], [36 / 8] * 8),
    ],
)
def test_every_rule_records_its_return_and_its_baseline(
    algorithm: Any, returns: list[float], baselines: list[float | None], model_folder: Path, quiet_trainer: Any
) -> None:
    learner = algorithm(policy(model_folder))
    learner.trainer = quiet_trainer()
    played = [
        played_episode(f"{group}{number}", group, {"agent": [("", reward) for reward in rewards]})
        for group, episodes in REWARDS.items()
        for number, rewards in enumerate(episodes)
    ]
    greedy = [played_episode(group, group, {"agent": [("", value)]}) for group, value in (("g", 2.5), ("h", 7.5))]
    tables = learner.trained_rows(played, Sampling(max_tokens=8), greedy)
    turns = [turn for episode in credited(played, played, tables) for turn in episode.turns()]
    assert [turn.return_ for turn in turns] == pytest.approx(returns)
    assert [turn.baseline for turn in turns] == (baselines if None in baselines else pytest.approx(baselines))
    assert None not in [turn.advantage for turn in turns]


@pytest.mark.parametrize(
    ("algorithm", "returns", "baselines"),
    [
        (CCPO, [3, 3, 6, 8, 6], [2] * 5),  # the mean of the history
        (SHARP, [6, 6, 12, 16, 12], [8, 8, 8, 14, 14]),  # the team's return and the contribution
    ],
)
def test_contributions_are_compared_with_their_baseline(
    algorithm: Any, returns: list[float], baselines: list[float], model_folder: Path
) -> None:
    learner = algorithm(policy(model_folder))
    learner.load_progress({"contributions": {"t/agent": [4, 2.0, 3.0]}})
    played = [
        played_episode(f"{group}{number}", group, {"agent": [("", reward) for reward in rewards]})
        for group, episodes in REWARDS.items()
        for number, rewards in enumerate(episodes)
    ]
    learner.unit = EpisodeCredit()  # without replays a contribution is the agent's return
    found = learner.with_baselines(learner.returns(played, None, ()))
    assert found.reward.tolist() == returns
    assert found.baseline.tolist() == baselines


def test_turns_out_of_the_action_mask_have_no_credit(model_folder: Path, quiet_trainer: Any) -> None:
    learner = REINFORCEPlusPlus(policy(model_folder))
    learner.trainer = quiet_trainer()
    played = [played_episode(str(number), "g", {"agent": [("", 1.0), ("", number)]}) for number in range(2)]
    read = [
        episode.with_rows(lambda row: dataclasses.replace(row, action_mask=(False, False, False, True)))
        for episode in played
    ]
    turns = [
        turn for episode in credited(played, read, learner.trained_rows(read, Sampling())) for turn in episode.turns()
    ]
    assert [turn.return_ for turn in turns] == [None, 0.0, None, 1.0]
    assert [turn.advantage is None for turn in turns] == [True, False, True, False]


@pytest.mark.parametrize("algorithm", [MAGRPO, COMA])
@pytest.mark.long_after(1)
def test_paths_of_a_turn_tree_share_the_credit_of_their_decisions(
    algorithm: Any, model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = collected(algorithm(policy(model_folder), weighting="equal"), LengthRatioGame(rounds=2), quiet_trainer)
    credit: dict[tuple[str, str, str], dict[int, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for episode in episodes:
        for turn in episode.turns():
            numbers = (turn.return_, turn.baseline, turn.advantage)
            credit[episode.group, turn.node, turn.agent][turn.sample].add(numbers)
    assert len(credit) > 2
    for decisions in credit.values():
        assert all(len(found) == 1 for found in decisions.values())
        made = [numbers for (numbers,) in decisions.values()]
        for value, baseline, advantage in made:
            assert advantage == pytest.approx(value - baseline, abs=1e-6)
            if algorithm is MAGRPO:
                assert baseline == pytest.approx(sum(value for value, _, _ in made) / len(made))
    assert any(advantage for decisions in credit.values() for ((_, _, advantage),) in decisions.values())


def test_records_without_credit_are_read_and_credit_is_no_difference(
    model_folder: Path, quiet_trainer: Any, echo: Any
) -> None:
    episode = collected(GRPO(policy(model_folder)), echo(), quiet_trainer)[0]
    old = json.loads(episode.to_json())
    for row in (row for rows in old["trajectories"].values() for row in rows):
        for turn in row["turns"]:
            del turn["return_"], turn["baseline"], turn["advantage"]
    plain = Episode.from_dict(old)
    assert plain.rows()[0].turns[0].advantage is None
    assert differences(plain, dataclasses.replace(episode, id="again")) == []


def test_new_rows_of_an_algorithm_have_no_record(model_folder: Path, quiet_trainer: Any) -> None:
    """It cuts the first token off; the tokens and turns are no longer those of the episodes."""
    learner = GRPO(policy(model_folder))
    learner.trainer = quiet_trainer()
    played = [played_episode(str(n), "g", {"agent": [("", reward)]}) for n, reward in enumerate((1.0, 3.0))]
    (rows,) = learner.trained_rows(played, Sampling(max_tokens=8)).values()
    first, second = rows.trajectories
    (turn,) = first.turns
    moved = dataclasses.replace(turn, start=turn.start - 1, stop=turn.stop - 1)
    cut = {name: getattr(first, name)[1:] for name in ("token_ids", "action_mask", "logprobs")}
    rows.trajectories = (dataclasses.replace(first, **cut, turns=(moved,)), second)
    (one,), (other,) = (list(episode.turns()) for episode in credited(played, played, {"main": rows}))
    assert (one.return_, one.baseline, one.advantage) == (None, None, None)
    assert (other.return_, other.baseline) == (3.0, 2.0)
    assert TokenMeasures.of(0, played, {"main": rows}).spans["main"][0] == []
