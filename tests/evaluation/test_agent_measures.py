"""Expected numbers are arithmetic on two small episodes of two agents and two policies."""

from __future__ import annotations

import dataclasses

import pytest

from mrlm_pl.data.rollout.evaluation import EpisodeBatch
from mrlm_pl.data.rollout.metrics import CollectionSums
from mrlm_pl.episode import Episode, Task
from mrlm_pl.evaluation.agents import Components, components_by_agent, stop_reasons
from tests.support.environments.counted_turns import episode, trajectory

FIRST = episode(
    0,
    "judged",
    False,
    trajectory("pro", "main", (0, 2, {"style": 0.5}, "stop"), (2, 4, {"won": 1.0}, "length")),
    trajectory("con", "other", (1, 3, {"won": -1.0}, "stop")),
)
SECOND = episode(1, "max_turns", True, trajectory("pro", "main", (0, 6, {}, "length")))


def test_every_agent_has_its_own_reward_length_and_turn_order() -> None:
    found = CollectionSums.of([FIRST, SECOND], 1.0).metrics()
    assert found["rollout/agent/pro/reward"] == (1.5 + 0) / 2
    assert found["rollout/agent/con/reward"] == (-1.0 + 0) / 2
    assert found["rollout/agent/pro/turns"] == (2 + 1) / 2
    assert found["rollout/agent/con/turns"] == (1 + 0) / 2
    assert found["rollout/agent/pro/first_turn"] == 0
    assert found["rollout/agent/con/first_turn"] == 1, "of the episode in which it acted"
    assert found["rollout/agent/pro/response_tokens"] == (2 + 4 + 6) / 3
    assert found["rollout/agent/pro/truncated_turns"] == pytest.approx(2 / 3)
    assert found["rollout/agent/con/truncated_turns"] == 0


def test_components_of_an_agent_sum_to_its_reward() -> None:
    found = CollectionSums.of([FIRST, SECOND], 1.0).metrics()
    assert found["rollout/agent/pro/components/style"] == 0.5 / 2
    assert found["rollout/agent/pro/components/won"] == 1.0 / 2
    assert found["rollout/agent/con/components/won"] == -1.0 / 2
    parts = components_by_agent([FIRST, SECOND], [1.0, 3.0])
    assert parts["pro"].means() == {"style": 0.5 / 4, "won": 1.0 / 4}


def test_policies_have_the_mean_of_the_agents_that_they_play() -> None:
    found = CollectionSums.of([FIRST, SECOND], 1.0).metrics()
    assert found["rollout/policy/main/reward"] == (1.5 + 0) / 2
    assert found["rollout/policy/other/reward"] == -1.0, "con acted in one episode"
    assert found["rollout/policy/main/response_tokens"] == 12 / 3
    assert found["rollout/policy/other/truncated_turns"] == 0


def test_agents_and_policies_have_the_entropy_of_their_own_tokens() -> None:
    """A policy that collapses beside a partner that does not is seen."""
    pro, con = FIRST.rows()
    likely = dataclasses.replace(pro, logprobs=(0.0, -0.25, -0.25, 0.0, 0.0, 0.0, 0.0))
    unlikely = dataclasses.replace(con, logprobs=(0.0, -1.0, -2.0, -3.0))
    played = dataclasses.replace(FIRST, trajectories={"pro": (likely,), "con": (unlikely,)})
    found = CollectionSums.of([played], 1.0).metrics()
    assert found["rollout/agent/pro/entropy"] == found["rollout/policy/main/entropy"] == 0.5 / 6
    assert found["rollout/agent/con/entropy"] == found["rollout/policy/other/entropy"] == 6.0 / 3
    assert found["rollout/entropy"] == 6.5 / 9
    stale = dataclasses.replace(con.turns[0], policy="other@3")
    earlier = dataclasses.replace(unlikely, turns=(stale,))
    played = dataclasses.replace(FIRST, trajectories={"pro": (likely,), "con": (earlier,)})
    found = CollectionSums.of([played], 1.0).metrics()
    assert "rollout/agent/con/entropy" not in found, "a snapshot sampled it"
    assert found["rollout/entropy"] == 0.5 / 6


def test_stop_reasons_are_shares_of_the_episodes() -> None:
    found = stop_reasons([FIRST, SECOND], [1.0, 3.0]).means()
    assert found == {"truncated_episodes": 0.75, "stop/judged": 0.25, "stop/max_turns": 0.75}
    assert stop_reasons([SECOND], [0.0]).means() == {}


def test_one_agent_and_one_policy_repeat_nothing() -> None:
    row = trajectory("pro", "main", (0, 2, {"won": 1.0}, "stop"))
    alone = Episode("0", Task("e", "train", 0), "g", 0, 0, {"pro": (row,)}, "end", agents=("pro",))
    found = CollectionSums.of([alone], 1.0).metrics()
    assert found["rollout/reward"] == 1.0
    assert not [name for name in found if "/agent/" in name or "/policy/" in name]


def test_parts_of_ranks_add_up_where_one_rank_has_no_such_component() -> None:
    found = CollectionSums.of([FIRST], 1.0).plus(CollectionSums.of([SECOND], 1.0)).metrics()
    assert found == {**CollectionSums.of([FIRST, SECOND], 1.0).metrics(), "rollout/tokens_per_second": 15.0}
    assert found["rollout/agent/pro/components/style"] == 0.25


def test_validation_has_every_agent() -> None:
    means = EpisodeBatch([FIRST, SECOND]).means()
    assert means["agent/pro/reward"] == (0.75, 2)
    assert means["agent/con/reward"] == (-0.5, 2)
    assert means["agent/pro/truncated_turns"] == (pytest.approx(2 / 3), 3)


def test_an_agent_without_a_token_has_no_entropy_in_a_validation() -> None:
    means = EpisodeBatch([episode(0, "judged", False, trajectory("pro", "main", (0, 0, {}, "stop")))]).means()
    assert means["agent/pro/response_tokens"] == (0.0, 1)
    assert "agent/pro/entropy" not in means


def test_the_whole_is_reported_where_some_turns_have_no_named_component() -> None:
    parts = Components.of([({"reward": 1.0, "right": 2.0}, 1.0), ({"reward": 1.0}, 1.0)])
    assert parts.means() == {"reward": (1 + 2 + 1) / 2, "right": 2 / 2}
