"""Expected gradients of actor-critics, running baselines and statistics by agent, summed over all outcomes of a game.

Two agents say bits: a, b, and a again if its first bit was 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrlm_pl.advantages import step_normalized_advantages
from mrlm_pl.algorithms import GRPO, IPPO, MAPPO, PPO, RAE, REINFORCE, DrMAS, MAPoRL, REINFORCEPlusPlus
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.learner.credit.joint_states import JointReader, acting_batches, joint_states
from mrlm_pl.learner.credit.returns import CreditParts, Returns, returns_of
from mrlm_pl.learner.credit.team import with_team_rewards
from mrlm_pl.learner.credit.tokens import RewardedRows, rewarded_rows
from mrlm_pl.policy import Policy
from mrlm_pl.policy.chat import ChatFormat
from tests.support.environments.enumerated_games import TOKENIZER, Game

WORTH = {"00": 1.0, "01": -2.0, "100": 0.5, "101": 3.0, "110": -1.0, "111": 0.25}
LOGITS = {"": 0.4, "0": -0.3, "1": 0.9, "10": 0.2, "11": -0.6}
SHARES = {"a": 1.0, "b": 0.5}
"""Of the worth that each agent earns."""
TEAM = 0.75
ACTS = "aba"
GUESSES = {bits: math.sin(3 * n + 1) for n, bits in enumerate(sorted({*WORTH, *LOGITS}))}
"""Values of a critic that knows nothing."""

Outcomes = list[tuple[float, list[Episode]]]
Terms = list[tuple[str, str, float]]
Value = Callable[[int, str], float]
"""The value that a critic gives to the bits said, in the turn of this number."""


@pytest.fixture(scope="module")
def game() -> Game:
    return Game(ACTS, WORTH, LOGITS, [*SHARES.values()])


@pytest.fixture(scope="module")
def episodes(game: Game) -> Outcomes:
    return game.outcomes(1)


@pytest.fixture(scope="module")
def pairs(game: Game) -> Outcomes:
    return game.outcomes(2)


def one(heard: str) -> float:
    return 1 / (1 + math.exp(-LOGITS[heard]))


def chance(bits: str, given: str = "") -> float:
    places = range(len(given), len(bits))
    return math.prod(one(bits[:n]) if bits[n] == "1" else 1 - one(bits[:n]) for n in places)


def mean(value: Callable[[str], float], given: str) -> float:
    """Return the expectation of a function of all bits, after these."""
    return sum(chance(bits, given) * value(bits) for bits in WORTH if bits.startswith(given))


def slope(heard: str, of_next: Callable[[str], float]) -> float:
    """Return the derivative by the logit of a decision, given the value after each bit."""
    return chance(heard) * one(heard) * (1 - one(heard)) * (of_next(heard + "1") - of_next(heard + "0"))


def true(factor: Callable[[str], float]) -> dict[str, float]:
    """Return the gradient of the expected worth, with a factor for the agent of each decision."""
    worth = {heard: slope(heard, lambda bits: mean(WORTH.__getitem__, bits)) for heard in LOGITS}
    return {heard: factor(ACTS[len(heard)]) * value for heard, value in worth.items()}


def said(episode: Episode) -> str:
    """Return the bits in their order."""
    replies = [
        (turn.index, row.messages[place].content)
        for row in episode.rows()
        for turn, place in zip(row.turns, row.replies, strict=True)
    ]
    return "".join(bit for _, bit in sorted(replies))


def term(episode: Episode, turn: Turn, advantage: float) -> tuple[str, str, float]:
    bits = said(episode)
    return bits[: turn.index], bits[turn.index], advantage


def by_token(tables: Any, batches: Any) -> Terms:
    """Return the terms of the bits' tokens, the first ones of each turn."""
    table = tables["main"]
    return [
        term(episode, turn, float(batches["main"].advantages[place, turn.start]))
        for place, (episode, row) in enumerate(zip(table.episodes, table.batch.trajectories, strict=True))
        for turn in row.turns
    ]


def token_terms(algorithm: Any, trainer: Any, value: Value) -> Callable[[list[Episode]], Terms]:
    """Return the credit of an algorithm with a critic that values every token."""

    def estimates(policy: str, table: RewardedRows) -> tuple[Tensor, Tensor]:
        values = torch.zeros_like(table.rewards)
        for place, (episode, row) in enumerate(zip(table.episodes, table.batch.trajectories, strict=True)):
            for turn in row.turns:  # its tokens are the bit and the end
                for token in range(2):
                    values[place, turn.start + token] = value(turn.index, said(episode)[: turn.index + token])
        return values, values[:, 0] * 0

    algorithm.trainer = trainer

    def terms(episodes: list[Episode]) -> Terms:
        tables = rewarded_rows(episodes)
        critic = SimpleNamespace(estimates=estimates, learners={}, normalized=False)
        parts = CreditParts(algorithm.metrics, algorithm._with_advantages, ["main"], lambda *_: 0.0, critic)
        algorithm.unit.credit(tables, parts)
        return by_token(tables, {name: table.batch for name, table in tables.items()})

    return terms


def joint_terms(algorithm: MAPPO, value: Value) -> Callable[[list[Episode]], Terms]:
    """Return the credit of MAPPO."""

    def terms(episodes: list[Episode]) -> Terms:
        states = joint_states(episodes, JointReader(ChatFormat(TOKENIZER), 4096))
        assert states is not None
        values = torch.zeros(states.batch.action_mask.shape)
        of_states = [value(step, said(episodes[number])[:step]) for number, step in states.keys]
        values[states.batch.action_mask] = torch.tensor(of_states)
        advantages = states.credit(values, algorithm.gamma, algorithm.lam, algorithm.targets)
        return by_token(rewarded_rows(episodes), acting_batches(episodes, advantages))

    return terms


def as_a_team(terms: Callable[[list[Episode]], Terms]) -> Callable[[list[Episode]], Terms]:
    return lambda episodes: terms([with_team_rewards(episode) for episode in episodes])


def actor_critic(name: str, lam: float, trainer: Any, value: Value) -> Callable[[list[Episode]], Terms]:
    policies = {"main": Policy()}
    if name == "MAPPO":
        return joint_terms(MAPPO(policies, lam=lam, whiten_advantages=False), value)
    if name == "PPO":
        return token_terms(PPO(policies, lam=lam, whiten_advantages=False), trainer, value)
    share: Any = name.removeprefix("IPPO ")
    terms = token_terms(IPPO(policies, reward=share, lam=lam, whiten_advantages=False), trainer, value)
    return as_a_team(terms) if share == "team" else terms


def factor_of(name: str) -> Callable[[str], float]:
    return SHARES.__getitem__ if name in ("PPO", "IPPO own") else lambda agent: TEAM


ACTOR_CRITICS = pytest.mark.parametrize("name", ["PPO", "IPPO own", "IPPO team", "MAPPO"])


@ACTOR_CRITICS
def test_returns_have_the_true_gradient_whatever_the_critic_says(
    name: str, game: Game, episodes: Outcomes, quiet_trainer: Any
) -> None:
    terms = actor_critic(name, 1.0, quiet_trainer(), lambda turn, bits: GUESSES[bits])
    assert game.mean_gradient(episodes, terms) == pytest.approx(true(factor_of(name)), abs=1e-6)


@ACTOR_CRITICS
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_exact_values_have_the_true_gradient_at_every_lambda(
    lam: float, name: str, game: Game, episodes: Outcomes, quiet_trainer: Any
) -> None:
    factor = factor_of(name)
    terms = actor_critic(
        name, lam, quiet_trainer(), lambda turn, bits: factor(ACTS[turn]) * mean(WORTH.__getitem__, bits)
    )
    assert game.mean_gradient(episodes, terms) == pytest.approx(true(factor), abs=1e-6)


@ACTOR_CRITICS
def test_without_returns_the_gradient_is_that_of_the_critics_values(
    name: str, game: Game, episodes: Outcomes, quiet_trainer: Any
) -> None:
    """MAPPO's steps end with the reward, while tokens are valued before the end of a turn."""
    found = game.mean_gradient(episodes, actor_critic(name, 0.0, quiet_trainer(), lambda turn, bits: GUESSES[bits]))
    ends = {bits: TEAM * worth for bits, worth in WORTH.items()} if name == "MAPPO" else {}
    biased = {heard: slope(heard, {**GUESSES, **ends}.__getitem__) for heard in LOGITS}
    assert found == pytest.approx(biased, abs=1e-6)
    assert max(abs(found[heard] - value) for heard, value in true(factor_of(name)).items()) > 0.1
    between = game.mean_gradient(episodes, actor_critic(name, 0.5, quiet_trainer(), lambda turn, bits: GUESSES[bits]))
    assert max(abs(between[heard] - value) for heard, value in true(factor_of(name)).items()) > 0.05


@pytest.mark.parametrize(("cls", "critic"), [(PPO, GUESSES), (REINFORCEPlusPlus, dict.fromkeys(GUESSES, 0.0))])
def test_whitening_is_biased(
    cls: Any, critic: dict[str, float], game: Game, pairs: Outcomes, quiet_trainer: Any
) -> None:
    """The mean and the deviation of a rollout of two episodes depend on the token that they whiten."""
    terms = token_terms(cls({"main": Policy()}), quiet_trainer(), lambda turn, bits: critic[bits])
    found, wanted = game.mean_gradient(pairs, terms), true(SHARES.__getitem__)
    assert found["0"] / wanted["0"] != pytest.approx(found["1"] / wanted["1"], rel=0.2)


# MAPoRL: scores of all answers, of which the first two are of the first turn of the discussion.

SCORES = {"0": 0.2, "1": 0.7, "00": 0.9, "01": 0.3, "10": 0.1, "11": 0.8} | {
    "100": 0.6, "101": 1.0, "110": 0.0, "111": 0.4
}  # fmt: skip
GAMMA = 0.3


def scored(episode: Episode) -> Episode:
    bits = said(episode)

    def rescored(turn: Turn) -> Turn:
        score = SCORES[bits[: turn.index + 1]]
        return dataclasses.replace(turn, reward=score, components={"score": score})

    return episode.with_turns(rescored)


def influence(bits: str, turn: int) -> float:
    """Return R of the answer of this number: its score, and that of a's second answer after a first one."""
    own = SCORES[bits[: turn + 1]]
    return (own + GAMMA * SCORES[bits]) / (1 + GAMMA) if len(bits) == 3 and turn < 2 else own


def expected_influence(turn: int, bits: str) -> float:
    return mean(lambda whole: influence(whole, turn), bits)


def maporl(lam: float, trainer: Any, value: Value) -> Callable[[list[Episode]], Terms]:
    algorithm = MAPoRL({"main": Policy()}, gamma=GAMMA, lam=lam, whiten_advantages=False)
    terms = token_terms(algorithm, trainer, value)
    return lambda episodes: terms([algorithm.influence(scored(episode))[0] for episode in episodes])


@pytest.mark.parametrize(
    ("lam", "value"),
    [
        pytest.param(1.0, lambda turn, bits: GUESSES[bits], id="returns"),
        pytest.param(0.0, expected_influence, id="exact values"),
    ],
)
def test_maporl_has_the_gradient_of_each_turns_influence(
    lam: float, value: Value, game: Game, episodes: Outcomes, quiet_trainer: Any
) -> None:
    found = game.mean_gradient(episodes, maporl(lam, quiet_trainer(), value))
    wanted = {heard: slope(heard, partial(expected_influence, len(heard))) for heard in LOGITS}
    assert found == pytest.approx(wanted, abs=1e-6)
    assert found != pytest.approx(sum_of_scores(), rel=0.1), "the turns have their own objectives"


def sum_of_scores() -> dict[str, float]:
    """Return the gradient of the expected discounted sum of the turns' mean scores."""

    def total(bits: str) -> float:
        return (SCORES[bits[:1]] + SCORES[bits[:2]]) / 2 + (GAMMA * SCORES[bits] if len(bits) == 3 else 0.0)

    return {heard: slope(heard, lambda bits: mean(total, bits)) for heard in LOGITS}


def test_maporl_with_a_wrong_critic_and_lambda_below_1_is_biased(
    game: Game, episodes: Outcomes, quiet_trainer: Any
) -> None:
    found = game.mean_gradient(episodes, maporl(0.0, quiet_trainer(), lambda turn, bits: GUESSES[bits]))
    assert found == pytest.approx({heard: slope(heard, GUESSES.__getitem__) for heard in LOGITS}, abs=1e-6)


# Baselines of episodes.


def episode_terms(advantages: Callable[[Returns], Tensor]) -> Callable[[list[Episode]], Terms]:
    """Return the credit of each agent's episodes, as the mean over the episodes."""

    def terms(episodes: list[Episode]) -> Terms:
        returns = returns_of(episodes)
        return [
            term(episode, turn, advantage / len(episodes))
            for advantage, episode, agent in zip(
                advantages(returns).tolist(), returns.episode, returns.agent, strict=True
            )
            for row in episode.trajectories[agent]
            for turn in row.turns
        ]

    return terms


def from_progress(algorithm: Any, trainer: Any, **progress: Any) -> Callable[[list[Episode]], Terms]:
    """Return the credit of a rollout that begins with these running baselines."""
    algorithm.trainer = trainer

    def advantages(returns: Returns) -> Tensor:
        algorithm.load_progress({**algorithm.progress(), **progress})
        return algorithm.advantages(algorithm.with_baselines(returns))

    return episode_terms(advantages)


@pytest.mark.parametrize(
    ("cls", "options", "progress"),
    [
        (RAE, {"baseline_decay": 0.5}, {"role_baselines": {"bits/a": 2.0, "bits/b": -1.0}}),
        (REINFORCE, {"baseline": "running"}, {"running_baselines": {"main": 3.0}}),
    ],
)
def test_baselines_from_before_the_episode_have_the_true_gradient(
    cls: Any, options: dict[str, Any], progress: dict[str, Any], game: Game, pairs: Outcomes, quiet_trainer: Any
) -> None:
    found = game.mean_gradient(pairs, from_progress(cls({"main": Policy()}, **options), quiet_trainer(), **progress))
    assert found == pytest.approx(true(SHARES.__getitem__), abs=1e-6)


def test_the_mean_of_a_rollout_contains_the_returns_of_both_agents(
    game: Game, pairs: Outcomes, quiet_trainer: Any
) -> None:
    """A quarter of both agents' returns of the own episode is subtracted, of which b's are half of a's."""
    found = game.mean_gradient(pairs, from_progress(REINFORCE({"main": Policy()}), quiet_trainer()))
    assert found == pytest.approx(true(lambda agent: SHARES[agent] - sum(SHARES.values()) / 4), abs=1e-6)


def centered(returns: Returns) -> Tensor:
    """Return Dr.MAS' advantages without the standard deviation, which is nothing beside this eps."""
    eps = 1e9
    return eps * step_normalized_advantages(returns.reward, returns.comparison, returns.turns, eps=eps)


def test_the_mean_over_an_agents_turns_keeps_the_direction_where_their_number_is_fixed(
    game: Game, pairs: Outcomes
) -> None:
    """b acts once in each episode, and its own return is half of the mean. a acts again after a 1, so that its own
    return then counts two of three or of four times, and its second decisions lose another factor than b's."""
    found, wanted = game.mean_gradient(pairs, episode_terms(centered)), true(SHARES.__getitem__)
    second = 1 - (one("") * 2 / 4 + (1 - one("")) * 2 / 3)
    factors = {"0": 0.5, "1": 0.5, "10": second, "11": second}
    assert {heard: found[heard] for heard in factors} == pytest.approx(
        {heard: factor * wanted[heard] for heard, factor in factors.items()}
    )
    by_episode = game.mean_gradient(
        pairs, episode_terms(GRPO({"main": Policy()}, advantage="group_centered").advantages)
    )
    assert by_episode == pytest.approx({heard: value / 2 for heard, value in wanted.items()}), "each episode once"


def test_the_deviation_of_an_agents_turns_is_biased(game: Game, pairs: Outcomes) -> None:
    """Of two returns it keeps the order alone: the gradients of b's two decisions have different factors."""
    found = game.mean_gradient(pairs, episode_terms(DrMAS({"main": Policy()}).advantages))
    wanted = true(SHARES.__getitem__)
    assert found["0"] / wanted["0"] != pytest.approx(found["1"] / wanted["1"], rel=0.2)
