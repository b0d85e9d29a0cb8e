"""Rewards of an answer in a discussion for its influence on the agent's own later answers and on those of the others.

Source: arXiv 2502.18439 (MAPoRL), with the signs that the paper means: positive for becoming right, negative
for becoming wrong.

A score table is a list over the turns of a discussion; each turn maps the persons who answered in it to their scores
``S(t, a)`` in [0, 1]. A discussion that ended early has fewer turns, and a person may be absent from a turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import UnitInterval, check_arguments

RewardShare = Literal["team", "own"]
"""Rewards that count, the whole team's or the agent's own."""
Horizon = Literal["discounted_sum", "last", "current"]
ScoreTable = Sequence[Mapping[str, float]]

INCENTIVES = ("alpha0", "alpha1", "beta0", "beta1")
"""The kinds of incentive; see :func:`incentives`."""
ROUNDING = 1e-12
"""Means nearer to 0.5 than this are 0.5: decimal fractions are not exact in binary."""


@check_arguments
def influence_rewards(
    scores: ScoreTable, gamma: UnitInterval, reward: RewardShare = "team", horizon: Horizon = "discounted_sum"
) -> list[dict[str, float]]:
    """Return ``R(t, a)``, in the shape of the scores: the reward of each answer for itself and for later answers.

    With T turns and ``mean_j`` over the persons who answered in a turn::

        team  R(t, a) = [S(t, a) + sum_{t' > t} gamma^(t' - t) mean_j S(t', j)] / sum_{t' >= t} gamma^(t' - t)
        own   R(t, a) = [S(t, a) + sum_{t' > t} gamma^(t' - t) S(t', a)] / sum_{t' >= t} gamma^(t' - t)

    A turn without the scores that its term asks for is left out of both sums.

    Args:
        scores: the score table.
        gamma: discount factor from turn to turn, in [0, 1].
        reward: scores that count: those of the whole ``team`` or the person's ``own``.
        horizon: ``discounted_sum`` is the formula above; ``last`` gives every answer the last turn's mean score
            (``own``: the person's last score), ``current`` its own turn's mean score (its own score).

    Raises:
        ConfigurationError: ``gamma``, ``reward`` or ``horizon`` is none of these.
        ValueError: there is no turn, or a score is not in [0, 1].

    >>> table = [{"a": 0.2, "b": 0.9}, {"a": 0.8, "b": 0.6}, {"a": 1.0, "b": 0.5}]
    >>> for turn in influence_rewards(table, gamma=0.3):
    ...     print({person: round(reward, 6) for person, reward in turn.items()})
    {'a': 0.343525, 'b': 0.847122}
    {'a': 0.788462, 'b': 0.634615}
    {'a': 1.0, 'b': 0.5}
    >>> [round(turn["a"], 6) for turn in influence_rewards(table, gamma=0.3, reward="own")]
    [0.381295, 0.846154, 1.0]
    >>> influence_rewards(table, gamma=0.3, horizon="last")[0], influence_rewards(table, 0.3, horizon="current")[0]
    ({'a': 0.75, 'b': 0.75}, {'a': 0.55, 'b': 0.55})
    """
    _check(scores)
    means = [math.fsum(turn.values()) / len(turn) if turn else None for turn in scores]

    def of_answer(t: int, person: str) -> float:
        own = [turn.get(person) for turn in scores]
        seen = means if reward == "team" else own
        if horizon == "current":
            return _known(seen[t : t + 1])[0][1]
        later = _known(seen[t:])
        if horizon == "last":
            return later[-1][1]
        weights = [gamma**distance for distance, _ in later]
        # The answer's own score comes first, even if later turns count by others' scores.
        values = [scores[t][person], *(value for _, value in later[1:])]
        return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / math.fsum(weights)

    return [{person: of_answer(t, person) for person in turn} for t, turn in enumerate(scores)]


def incentives(
    scores: ScoreTable, alpha0: float = 0.0, alpha1: float = 0.0, beta0: float = 0.0, beta1: float = 0.0
) -> tuple[list[dict[str, float]], int]:
    """Return rewards for changing sides well and for making others do so, in the shape of the scores, and the ties.

    An answer is right when its score is above 0.5; the others are when the mean of theirs is. An answer that was wrong
    before and is right now earns the positive amount, one that was right and is wrong now the negative one. It earns
    the same for the others when they change from its turn to the next. A comparison with a mean of exactly 0.5 is a
    tie: it earns 0 and is counted, unless there was no change.

    Args:
        scores: the score table.
        alpha0: incentive for a change of one's own answer while the others had been wrong: self-correction.
        alpha1: incentive for a change of one's own answer while the others had been right: being persuaded.
        beta0: incentive for a change of the others after a wrong answer.
        beta1: incentive for a change of the others after a right answer.

    Raises:
        ConfigurationError: an amount is NaN or infinite.
        ValueError: there is no turn, or a score is not in [0, 1].

    >>> table = [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    >>> incentives(table, alpha0=1.0, alpha1=0.1, beta0=10.0, beta1=0.01)  # a is persuaded by b, who was right
    ([{'a': 0.0, 'b': 0.01}, {'a': 0.1, 'b': 0.0}], 0)
    """
    amounts = dict(zip(INCENTIVES, (alpha0, alpha1, beta0, beta1), strict=True))
    for name, amount in amounts.items():
        if not math.isfinite(amount):
            raise ConfigurationError(f"{name} is {amount!r}; it must be a finite number")
    signs, ties = incentive_signs(scores)
    pay = [
        {person: math.fsum(amounts[kind] * sign for kind, sign in found.items()) for person, found in turn.items()}
        for turn in signs
    ]
    return pay, ties


def incentive_signs(scores: ScoreTable) -> tuple[list[dict[str, dict[str, int]]], int]:
    """Return the incentives that each answer earns, 1 or -1 by kind in the shape of the scores, and the number of ties.

    The own change from the turn before is compared with the others in the turn before; the change of the others up to
    the next turn is that of those who answered in both turns. See :func:`incentives`.

    Raises:
        ValueError: there is no turn, or a score is not in [0, 1].

    >>> incentive_signs([{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 0.0}])
    ([{'a': {}, 'b': {'beta0': 1}}, {'a': {'alpha0': 1}, 'b': {}}], 0)
    """
    _check(scores)
    signs: list[dict[str, dict[str, int]]] = [{person: {} for person in turn} for turn in scores]
    ties = 0
    for t, turn in enumerate(scores):
        before = scores[t - 1] if t else {}
        after = scores[t + 1] if t + 1 < len(scores) else {}
        for person in turn:
            changes = []
            bystanders = [before[other] for other in before if other != person]
            if person in before and bystanders:
                changes.append(("alpha", _side([before[person]]), _side([turn[person]]), _side(bystanders)))
            both = [other for other in turn if other in after and other != person]
            if both:
                now, then = _side([turn[other] for other in both]), _side([after[other] for other in both])
                changes.append(("beta", now, then, _side([turn[person]])))
            for letter, old, new, condition in changes:
                if old == new != 0:
                    continue
                if 0 in (old, new, condition):
                    ties += 1
                else:
                    signs[t][person][f"{letter}{int(condition > 0)}"] = new
    return signs, ties


def _side(scores: Sequence[float]) -> int:
    """Return 1 when the mean of the scores is above 0.5, -1 when it is below, 0 when it is neither."""
    distance = math.fsum(scores) / len(scores) - 0.5
    if abs(distance) < ROUNDING:
        return 0
    return 1 if distance > 0 else -1


def _known(values: Sequence[float | None]) -> list[tuple[int, float]]:
    """Return the values that are not None, with their places."""
    return [(place, value) for place, value in enumerate(values) if value is not None]


def _check(scores: ScoreTable) -> None:
    if not scores:
        raise ValueError("scores has 0 turns; give at least one")
    for t, turn in enumerate(scores):
        for person, score in turn.items():
            if not 0 <= score <= 1:  # NaN compares false
                raise ValueError(f"scores: that of {person!r} in turn {t} is {score!r}; it must be between 0 and 1")
