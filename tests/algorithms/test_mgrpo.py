"""M-GRPO: a planner and its calls, by hand arithmetic, summed over outcomes, and in a run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import Helpers

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.algorithms import GRPO, MGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Message, Step
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from tests.support.runs.turn_episodes import advantages, episode

AGENTS = ("planner", "helper@1", "helper@2")


def played(number: int, planner: float, *calls: float) -> Episode:
    rows = {"planner": [("s", planner)]} | {f"helper@{k}": [("s", own)] for k, own in enumerate(calls, 1)}
    return replace(episode(number, "g", rows), agents=AGENTS)


EPISODES = [played(0, 1.0, 0.5, 0.0), played(1, 0.0), played(2, 0.0, 0.5)]


@pytest.fixture
def policies(model_folder: Path) -> dict[str, Policy]:
    return {"main": Policy(str(model_folder))}


def normalized(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def test_calls_earn_the_planners_result_and_are_compared_with_each_other(policies: Any, quiet_trainer: Any) -> None:
    found = advantages(MGRPO(policies), EPISODES, quiet_trainer())
    planner, calls = normalized([1.0, 0.0, 0.0]), normalized([1.5, 1.0, 0.5])
    expected = [planner[0], calls[0], calls[1], planner[1], planner[2], calls[2]]
    assert [row[0] for row in found] == pytest.approx(expected, abs=1e-5)


def test_calls_do_not_share_the_planners_length_penalty(policies: Any) -> None:
    returns = MGRPO(policies).returns(EPISODES, lambda turn: -10.0 if turn.agent == "planner" else 0.0, ())
    assert returns.reward.tolist() == [-9.0, 1.5, 1.0, -10.0, -10.0, 0.5]


def test_one_call_in_all_episodes_is_grpo(policies: Any, quiet_trainer: Any) -> None:
    """The planner earns nothing here, and each episode has one call."""
    episodes = [played(0, 0.0, 0.5), played(1, 0.0, 1.0), played(2, 0.0, 0.0)]
    assert advantages(MGRPO(policies), episodes, quiet_trainer()) == advantages(
        GRPO(policies), episodes, quiet_trainer()
    )


@pytest.mark.parametrize(("size", "counts"), [(2, [1, 1]), (3, [1, 1, 1]), (7, [2, 2, 3]), (1, [1])])
def test_each_group_has_as_many_calls(policies: Any, size: int, counts: list[int]) -> None:
    algorithm = MGRPO(policies, calls_per_group=size)
    returns = algorithm.returns(EPISODES, None, ())
    chosen = algorithm.chosen(returns)
    assert chosen == algorithm.chosen(returns), "drawn alike each time"
    agents = [returns.agent[number] for number in chosen]
    assert agents.count("planner") == 3
    calls = Counter(number for number, agent in zip(chosen, agents, strict=True) if agent != "planner")
    assert sorted(calls.values()) == counts
    taken = returns.take(chosen)
    assert taken.reward.tolist() == [returns.reward[number] for number in chosen]
    assert sum(len(rows) for rows in taken.rows(torch.zeros(len(chosen))).values()) == 3 + size


def test_the_planner_can_be_named(policies: Any, quiet_trainer: Any) -> None:
    alone = [replace(played(n, reward, 0.5), agents=("helper@1", "planner")) for n, reward in enumerate((1.0, 0.0))]
    found = advantages(MGRPO(policies, planner="planner"), alone, quiet_trainer())
    assert [row[0] for row in found] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5), -(0.5**0.5)], abs=1e-5)
    with pytest.raises(ConfigurationError, match="planner is 'boss', but the agents of environment 't' are helper@1"):
        MGRPO(policies, planner="boss").lacks_signal(alone)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigurationError, match="calls_per_group is 0"):
        MGRPO(calls_per_group=0)


def test_signals_of_calls_count(policies: Any) -> None:
    assert MGRPO(policies).lacks_signal([played(0, 1.0, 0.5), played(1, 1.0, 0.5)])
    assert not MGRPO(policies).lacks_signal([played(0, 1.0, 0.5, 0.0), played(1, 1.0, 0.5)])
    assert GRPO(policies).lacks_signal([played(0, 1.0, 0.5, 0.0), played(1, 1.0, 0.5)])


Outcome = tuple[int, ...]
RIGHT, MORE = 0.3, 0.6
"""Probabilities of a right call and of a second one."""


def gradients(reward: Any) -> tuple[float, float]:
    """Return the expected centered gradient of groups of two episodes, and the true one, in the logit of RIGHT."""
    outcomes = [(bit,) for bit in (0, 1)] + list(itertools.product((0, 1), repeat=2))
    chance = {
        o: math.prod(RIGHT if b else 1 - RIGHT for b in o) * (MORE if len(o) == 2 else 1 - MORE) for o in outcomes
    }
    score = {o: sum(bit - RIGHT for bit in o) for o in outcomes}  # the derivative of log p
    true = sum(chance[o] * sum(reward(o, k) for k in range(len(o))) * score[o] for o in outcomes)
    found = 0.0
    for group in itertools.product(outcomes, repeat=2):
        calls = [(o, k) for o in group for k in range(len(o))]
        credit = group_centered_advantages(
            torch.tensor([float(reward(o, k)) for o, k in calls]), torch.zeros(len(calls), dtype=torch.int64)
        )
        terms = [a * (o[k] - RIGHT) for a, (o, k) in zip(credit.tolist(), calls, strict=True)]
        found += math.prod(chance[o] for o in group) * sum(terms) / 2
    return found, true


def test_scores_of_calls_keep_their_direction_and_shared_results_are_biased() -> None:
    """n of 2, 3 or 4 calls: own scores lose the factor E[n - 1] / E[n], a shared result another one."""
    factor = (2 * (1 + MORE) - 1) / (2 * (1 + MORE))
    found, true = gradients(lambda outcome, call: outcome[call])
    assert found == pytest.approx(factor * true)
    shared, wanted = gradients(lambda outcome, call: all(outcome) / len(outcome))
    assert 0 < shared < wanted
    assert shared != pytest.approx(factor * wanted, rel=0.05)


def test_the_number_of_calls_varies() -> None:
    def play(*replies: str) -> tuple[list[str], Step, Mapping[str, float]]:
        game = Helpers(calls=2)
        task = replace(game.tasks("train")[0], data={"round": 1, "letter": "C"})
        observations, asked, earned = game.reset(task), [], Counter[str]()
        for reply in replies:
            ((agent, _),) = observations.items()
            asked.append(agent)
            step = game.step({agent: Message("assistant", reply)})
            observations = step.observations
            earned.update(step.rewards)
        assert step.done
        return asked, step, earned

    asked, step, earned = play("A", "C")
    assert (asked, step.success, earned) == (["planner", "planner"], True, {"planner": 1.0})
    asked, step, earned = play("C", "c!", "A", "A")
    assert asked == ["planner", "helper@1", "planner", "planner"]
    assert (step.success, earned["planner"], earned["helper@1"]) == (False, -0.05, 0.5)
    asked, step, earned = play("C", "A", "C", "C", "C")
    assert asked == ["planner", "helper@1", "planner", "helper@2", "planner"]
    assert earned == pytest.approx({"planner": 1 - 2 * 0.05, "helper@1": 0.0, "helper@2": 0.5})
    assert step.metrics == {"calls": 2.0}


def test_a_run_trains_planner_and_helpers(quiet_trainer: Any) -> None:
    seats = {"planner": "planner"} | {f"helper@{k}": "helper" for k in (1, 2)}
    policies = {name: Policy("builtin:tiny") for name in ("planner", "helper")}
    algorithm = MGRPO(policies, seats, calls_per_group=4)
    data = RolloutDataModule(Helpers(calls=2), groups=4, group_size=4, iterations=2, sampling=Sampling(max_tokens=4))
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.global_step == 2
    for name in policies:
        assert trainer.callback_metrics[f"train/{name}/grad_norm"] > 0
