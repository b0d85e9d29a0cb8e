"""Recorded episodes played again, as they were and with other decisions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mrlm_pl.engines.base import Engine, Sample, SampleRequest, Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.replay import Rest, counterfactuals, differences, replayed, written

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)


class Digits(Engine):
    """Answers with a digit that is a function of the request's seed."""

    def __init__(self) -> None:
        self.sampled = 0

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self.sampled += len(requests)
        return [self._sample(request) for request in requests]

    def _sample(self, request: SampleRequest) -> Sample:
        ids = (*TOKENIZER.encode(str(request.seed % 10), add_special_tokens=False), TOKENIZER.eos_token_id)
        return Sample(ids, (-0.5, -0.1), "stop", 3, "digits")

    def load(self, policy: str, weights: Any, version: int) -> None:
        raise AssertionError("the player loads no weights")


class ReplayedSums(Environment):
    """``a`` and ``b`` say digits at the same time, then ``c`` hears both; the sum of all three is rewarded."""

    name = "sums"
    agents = ("a", "b", "c")
    bonus = 0.0

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        return {agent: [Message("user", "Begin")] for agent in ("a", "b")}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if "c" not in actions:
            self.said = [int(actions[agent].content) for agent in ("a", "b")]
            return Step({"c": [Message("user", f"They said {self.said}")]})
        total = sum(self.said) + int(actions["c"].content) + self.bonus
        return Step(rewards=dict.fromkeys(self.agents, float(total)), done=True, stop_reason="end")


def play(specs: Sequence[EpisodeSpec], bonus: float = 0.0) -> tuple[list[Episode], Digits]:
    environment, engine = ReplayedSums(), Digits()
    environment.bonus = bonus
    seats = {agent: Seat("main", CHAT, Sampling(), 2048) for agent in environment.agents}
    player = EpisodePlayer({"sums": environment}, seats, engine)
    try:
        return player.play_blocking(specs), engine
    finally:
        player.close()


@pytest.fixture(scope="module")
def episode() -> Episode:
    (made,), _ = play([EpisodeSpec("e", ReplayedSums().tasks("train")[0], "g", seed=5, iteration=2)])
    return made


def words(episode: Episode) -> list[str]:
    return [episode.trajectories[agent][0].messages[-1].content for agent in ("a", "b", "c")]


def test_a_replay_is_equal_and_samples_nothing(episode: Episode) -> None:
    (again,), engine = play([replayed(Episode.from_json(episode.to_json()))])
    assert engine.sampled == 0
    assert differences(episode, again) == []
    assert again.trajectories == episode.trajectories
    assert again.seed == episode.seed


def test_a_changed_reward_is_found(episode: Episode) -> None:
    (again,), _ = play([replayed(episode)], bonus=0.5)
    found = differences(episode, again)
    assert f"trajectories.a[0].turns[0].reward: {episode.reward}, {episode.reward + 0.5}" in found
    assert all("reward" in text for text in found)


def test_a_changed_observation_is_found(episode: Episode) -> None:
    row = episode.trajectories["c"][0]
    other = dataclasses.replace(row, messages=(Message("user", "They said nothing"), row.messages[1]))
    changed = dataclasses.replace(episode, trajectories={**episode.trajectories, "c": (other,)})
    (again,), _ = play([replayed(episode)])
    (text,) = differences(changed, again)
    assert text.startswith("trajectories.c[0].messages[0].content: 'They said nothing', 'They said [")


def test_the_error_of_a_replay_is_told_first(episode: Episode) -> None:
    failed = dataclasses.replace(episode, trajectories={}, stop_reason="error", error="TypeError in reset")
    assert differences(episode, failed)[0] == "error: None, 'TypeError in reset'"


@pytest.mark.parametrize("rest", ["play", "replay"])
def test_a_replaced_decision_is_seen_by_later_agents_alone(episode: Episode, rest: Rest) -> None:
    nine = written("9", CHAT, "main")
    (spec,) = counterfactuals(episode, "a", 0, [nine], rest)
    (other,), engine = play([spec])
    a, b, c = words(episode)
    assert words(other)[:2] == ["9", b], "b did not hear a"
    assert other.trajectories["c"][0].messages[0].content == f"They said [9, {b}]"
    assert engine.sampled == (rest == "play")
    if rest == "replay":
        assert words(other)[2] == c
        assert other.reward - episode.reward == 9 - int(a)


def test_alternatives_are_sampled_each_with_its_own_seed(episode: Episode) -> None:
    specs = counterfactuals(episode, "c", 1, [None] * 8)
    first, engine = play(specs)
    assert engine.sampled == 8
    assert len({other.id for other in first}) == 8
    assert {tuple(words(other)[:2]) for other in first} == {tuple(words(episode)[:2])}
    assert len({words(other)[2] for other in first}) > 2
    assert [other.reward for other in play(specs)[0]] == [other.reward for other in first]


def test_a_script_that_silences_agents_gives_the_return_of_the_others(episode: Episode) -> None:
    """A team's return without some agents, whose decisions become 0: what Shapley values are made of."""
    a, b, c = map(int, words(episode))
    zero = written("0", CHAT, "main")
    for missing in itertools.product([False, True], repeat=2):
        script = dict(replayed(episode).script)
        script |= {(agent, 0): zero for agent, gone in zip("ab", missing, strict=True) if gone}
        (other,), _ = play([dataclasses.replace(replayed(episode), script=script)])
        assert other.reward == a * (not missing[0]) + b * (not missing[1]) + c


@pytest.mark.parametrize(
    ("agent", "step", "message"),
    [
        ("a", 1, "turn: agent 'a' did not decide at turn 1 of episode 'e'; choose a turn of a at 0; b at 0; c at 1"),
        ("z", 0, "turn: agent 'z' did not decide at turn 0 of episode 'e'; choose a turn of a at 0; b at 0; c at 1"),
    ],
)
def test_a_decision_that_was_not_made_is_an_error(episode: Episode, agent: str, step: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        counterfactuals(episode, agent, step, [None])
