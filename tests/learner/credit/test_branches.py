"""Credit of branches: expected gradients over all outcomes of small games, and advantages by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import pytest

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.episode import Episode, Origin, Task
from mrlm_pl.learner.credit.branches import WHOLE, AlternativeCredit, LeafCredit, common_steps
from mrlm_pl.learner.credit.turns import turn_returns_of
from mrlm_pl.rollout import branches
from mrlm_pl.rollout.branches import Alternatives, Expansions
from tests.support.environments.enumerated_games import Choices, Game

WORTH = {"00": 1.0, "01": -0.5, "10": 0.25, "11": 2.0}
LOGITS = {"": 0.4, "0": -0.3, "1": 0.9}


def messages(episodes: list[Episode], rest: Literal["play", "replay"]) -> list[tuple[str, str, float]]:
    returns = AlternativeCredit(Alternatives(2, None, rest, ("main",)), "team").returns(episodes)
    advantages = leave_one_out_advantages(returns.reward, returns.comparison).tolist()
    return [
        (heard(d.row.messages[-2].content), d.row.messages[-1].content, advantage)
        for d, advantage in zip(returns.decisions, advantages, strict=True)
    ]


def heard(text: str) -> str:
    return text.removeprefix("user: ").strip("#.")


def leaves(episodes: list[Episode], credit: LeafCredit) -> list[tuple[str, str, float]]:
    turns = turn_returns_of(episodes)
    advantages = credit.advantages(turns).tolist()
    said = [m.content for row in turns.trajectory for m in row.messages if m.role == "assistant"]
    return [(heard(state), bit, a) for state, bit, a in zip(turns.state, said, advantages, strict=True)]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_alternatives_that_are_played_on_have_the_true_gradient(count: int) -> None:
    game = Game("ab", WORTH, LOGITS)
    found = game.expected(Alternatives(count, None, "play", ("main",)), 1, lambda e: messages(e, "play"))
    assert found == pytest.approx({key: (count + 1) * value for key, value in game.true_gradient().items()})


def test_a_random_message_has_its_share_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game("ab", WORTH, LOGITS)
    monkeypatch.setattr(branches, "keyed_random", lambda *key: Sampled(game.choices))
    found = game.expected(Alternatives(1, 1, "play", ("main",)), 1, lambda e: messages(e, "play"))
    assert found == pytest.approx({key: 2 / 2 * value for key, value in game.true_gradient().items()})


class Sampled:
    def __init__(self, choices: Choices) -> None:
        self.choices = choices.choices

    def sample(self, found: Any, k: int) -> Any:
        return self.choices(found, k)


def test_a_replayed_rest_misses_the_effect_on_later_messages() -> None:
    """It estimates the gradient under a reply that does not depend on the message: drawn as after any message.

    Here b repeats the bit of a, and equal bits are rewarded: no message is better, but 1 fits the usual reply.
    """
    logits, worth = {"": 1.0, "0": -2.0, "1": 2.0}, {"00": 1.0, "01": -1.0, "10": -1.0, "11": 1.0}
    game = Game("ab", worth, logits)
    found = game.expected(Alternatives(2, None, "replay", ("main",)), 1, lambda e: messages(e, "replay"))
    one = {key: 1 / (1 + math.exp(-logit)) for key, logit in logits.items()}
    reply = (1 - one[""]) * one["0"] + one[""] * one["1"]  # that b says 1
    earned = [(1 - reply) * worth[f"{bit}0"] + reply * worth[f"{bit}1"] for bit in (0, 1)]
    direct = one[""] * (1 - one[""]) * (earned[1] - earned[0])
    true = game.true_gradient()
    assert found == pytest.approx({"": 2 * direct, "0": 2 * true["0"], "1": 2 * true["1"]})
    assert true[""] == pytest.approx(0)
    assert direct > 0.1


class At:
    """Draws the state of this number, the last with -1."""

    def __init__(self, place: int) -> None:
        self.place = place

    def choices(self, found: Any, k: int) -> Any:
        return [found[self.place]]


@pytest.mark.parametrize("places", [(0, -1), pytest.param((-1, -1), marks=pytest.mark.slow)])
def test_leaves_against_those_without_the_turn_have_the_true_gradient(
    monkeypatch: pytest.MonkeyPatch, places: tuple[int, int]
) -> None:
    """In every form of the two trees."""
    game, drawn = Game("aa", WORTH, LOGITS), itertools.cycle(places)
    monkeypatch.setattr(branches, "keyed_random", lambda *key: At(next(drawn)))
    found = game.expected(Expansions(1, 1), 2, lambda e: leaves(e, LeafCredit(normalize=False)))
    assert found == pytest.approx({key: 4 * value for key, value in game.true_gradient().items()}), "of four leaves"


def test_the_published_advantages_weigh_later_turns_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trees branch after their first turn. That turn's credit within its tree is 0, and half of the four leaves
    of the task contain it: 4 / 2 of its gradient. The second turn has half of its tree and three quarters of the task:
    4 (1 / 2 + 3 / 4)."""
    game = Game("aa", WORTH, LOGITS)
    monkeypatch.setattr(branches, "keyed_random", lambda *key: At(-1))
    found = game.expected(Expansions(1, 1), 2, lambda e: leaves(e, LeafCredit("paper", normalize=False)))
    true = game.true_gradient()
    assert found == pytest.approx({"": 2 * true[""], "0": 5 * true["0"], "1": 5 * true["1"]})


def test_episodes_of_different_length_bias_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long episodes are continued from their later states as well, so that fewer leaves leave at the first."""
    game = Game("aa", {"0": 1.0, "10": 0.0, "11": 2.0}, {"": 0.4, "1": 0.9})
    monkeypatch.setattr(branches, "keyed_random", lambda *key: game.choices)
    found = game.expected(Expansions(1, 1), 2, lambda e: leaves(e, LeafCredit(normalize=False)))
    true = game.true_gradient()
    shares = {key: found[key] / (4 * true[key]) for key in true}
    assert shares == pytest.approx({"": 0.9306344, "1": 1.1003281}, abs=1e-6)


def leaf(name: str, origin: Origin | None = None) -> Episode:
    return Episode(name, Task("t", "train", 0), "g", 0, 0, {}, "end", origin=origin)


def test_steps_that_leaves_share() -> None:
    group = [
        leaf("0"),
        leaf("1"),
        leaf("0/2", Origin("0", ("a",), 2)),
        leaf("0/2/3", Origin("0/2", ("a",), 3)),
        leaf("0/2/1", Origin("0/2", ("a",), 1)),
    ]
    w = WHOLE
    assert common_steps(group).tolist() == [
        [w, 0, 2, 2, 1],
        [0, w, 0, 0, 0],
        [2, 0, w, 3, 1],
        [2, 0, 3, w, 1],
        [1, 0, 1, 1, w],
    ]
