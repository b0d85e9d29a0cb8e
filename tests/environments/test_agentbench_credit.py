"""Turn trees and GiGPO's states in the graph, the shop and the house: played replies, judged by fresh environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import AlfWorldEnvironment, KnowledgeGraphEnvironment, WebShopEnvironment

from mrlm_pl.algorithms import GiGPO
from mrlm_pl.engines.base import Engine, Sample, SampleRequest
from mrlm_pl.environment import Environment, Task
from mrlm_pl.episode import Episode, Message
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.tree_player import Branching, TreePlayer
from tests.rollout.test_player import TOKENIZER, seats
from tests.rollout.test_turn_tree import played_trees
from tests.support.runs.turn_episodes import advantages

WINDOW = 100_000
WRONG = "Hm."
MAKE: dict[str, Callable[..., Environment]] = {
    "knowledge_graph": lambda **options: KnowledgeGraphEnvironment(kinds=["join"], hops=(1, 1), **options),
    "webshop": lambda **options: WebShopEnvironment(page_size=2, list_actions=False, **options),
    "alfworld": lambda **options: AlfWorldEnvironment(kinds=["pick"], steps=(3, 5), list_actions=False, **options),
}


class Replies(Engine):
    """Give the reply that a function of the request returns."""

    def __init__(self, reply: Callable[[SampleRequest], str]) -> None:
        self.reply = reply

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        texts = [TOKENIZER.encode(self.reply(request), add_special_tokens=False) for request in requests]
        return [Sample((*ids, TOKENIZER.eos_token_id), (-0.5,) * (len(ids) + 1), "stop", 0, "e") for ids in texts]

    def load(self, policy: str, weights: Any, version: int) -> None:
        raise AssertionError("the player loads no weights")


def gold_of(environment: Environment, task: Task) -> Mapping[str, Sequence[str]]:
    gold = environment.gold(task)
    assert gold is not None
    return gold


def said(episode: Episode) -> dict[str, list[Message]]:
    return {
        agent: [message for row in rows for message in row.messages if message.role == "assistant"]
        for agent, rows in episode.trajectories.items()
    }


@pytest.mark.parametrize("team", [False, True], ids=["agent", "team"])
@pytest.mark.parametrize("name", MAKE)
def test_every_path_of_a_turn_tree_is_an_episode_of_its_own_replies(name: str, team: bool) -> None:
    environment = MAKE[name](team=team, max_turns=3)
    task = environment.tasks("train")[0]
    known = [WRONG, *(reply for replies in gold_of(MAKE[name](team=team), task).values() for reply in replies)]
    engine = Replies(lambda request: known[request.seed % len(known)])
    player = EpisodePlayer({name: environment}, seats(*environment.agents, window=WINDOW), engine)
    (paths,) = played_trees(TreePlayer(player, Branching(), 3), [EpisodeSpec("t", task, "t", seed=3)])
    player.close()
    assert not any(path.failed for path in paths)
    states = {turn.node for path in paths for row in path.rows() for turn in row.turns}
    assert 2 * len(states) + 1 == len(paths) > 8, "three decisions in each state"
    for path in paths:
        alone, left = MAKE[name](team=team, max_turns=3), said(path)
        observations, rewards = alone.reset(task), []
        while observations:
            (agent,) = observations
            step = alone.step({agent: left[agent].pop(0)})
            observations = step.observations
            rewards.append(step.rewards)
        assert not any(left.values())
        assert (step.done, step.stop_reason, step.success) == (True, path.stop_reason, path.success)
        assert rewards == [dict(own) for own in path.step_rewards]


@pytest.mark.parametrize("name", MAKE)
def test_gigpo_compares_turns_in_the_same_state(name: str, model_folder: Path, quiet_trainer: Any) -> None:
    environment = MAKE[name](instruction="")
    task = environment.tasks("train")[0]
    gold = gold_of(environment, task)["agent"]
    # The expert; its first reply and then wrong ones; wrong ones alone.
    wanted = {"e0": gold, "e1": [gold[0]], "e2": []}
    spoken = dict.fromkeys(wanted, 0)

    def reply(request: SampleRequest) -> str:
        episode = request.session.partition("/")[0]
        spoken[episode] += 1
        return wanted[episode][spoken[episode] - 1] if spoken[episode] <= len(wanted[episode]) else WRONG

    environment.max_turns = len(gold)  # type: ignore[attr-defined]
    player = EpisodePlayer({name: environment}, seats("agent", window=WINDOW), Replies(reply))
    episodes = player.play_blocking([EpisodeSpec(episode, task, "g", seed=0) for episode in wanted])
    player.close()
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 0.0]
    found = []
    for weight in (1.0, 0.0):
        algorithm = GiGPO({"main": Policy(str(model_folder))}, state_weight=weight)
        credited = advantages(algorithm, episodes, quiet_trainer())
        lengths = [[turn.stop - turn.start for turn in row.turns] for episode in episodes for row in episode.rows()]
        found.append([by_turn(values, own) for values, own in zip(credited, lengths, strict=True)])
    first, second, third = (
        [a - b for a, b in zip(with_states, without, strict=True)] for with_states, without in zip(*found, strict=True)
    )
    assert first[0] > 0 > third[0], "all begin in the same state"
    assert first[1] > 0 > second[1], "two read the same text after the same reply"
    assert first[2:] == [0.0] * len(first[2:]), "no other episode was there"


def by_turn(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return one value a turn of the values of its tokens."""
    firsts, place = [], 0
    for length in lengths:
        assert len(set(values[place : place + length])) == 1
        firsts.append(values[place])
        place += length
    assert place == len(values)
    return firsts
