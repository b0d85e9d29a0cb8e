"""Elo ratings with intervals from the results of games, by maximum likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.intervals import Z95

ELO = 400 / math.log(10)
"""Elo points of a difference of 1 in the logarithm of the odds."""

_STEPS, _PRECISION = 200, 1e-10


@dataclass(frozen=True)
class Rating:
    """A player's strength.

    Args:
        elo: points above the reference player, whose rating is 0.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
    """

    elo: float
    low: float
    high: float


class GameTable(dict[tuple[str, str], tuple[float, int]]):
    """Results of games between players that have names: the first one's score and the number of games, by pair.

    A win counts 1 and a draw a half; the rest of a player's score is the other's.
    """

    def add(self, player: str, other: str, score: float, games: int) -> None:
        """Record ``games`` games, in which the player scored ``score``."""
        if player > other:
            player, other, score = other, player, games - score
        before = self.get((player, other), (0.0, 0))
        self[player, other] = (before[0] + score, before[1] + games)


def game_score(episode: Episode, own: Sequence[str], others: Sequence[str]) -> float:
    """Return 1, 0.5 or 0: the agents ``own`` earned more than the ``others``, as much or less, in the mean.

    An agent that had no turn earned 0.
    """
    rewards = episode.rewards()
    mean, other_mean = (fmean(rewards.get(agent, 0.0) for agent in agents) for agents in (own, others))
    return 0.5 if mean == other_mean else float(mean > other_mean)


def elo_ratings(table: GameTable, zero: str, virtual_draws: float = 1.0) -> dict[str, Rating]:
    """Return players' ratings by the Bradley-Terry model, in which ``p = 1 / (1 + 10^(-difference / 400))``.

    The ratings are those of highest likelihood (Bradley and Terry 1952), with a draw as half a win for each. Every pair
    that met counts ``virtual_draws`` drawn games more, so that a player who won all games has a finite rating. The
    intervals are normal with the standard errors of the information matrix, for the difference to ``zero``; they take
    games as independent, and games with draws for as uncertain as games without.

    Args:
        table: results of games; players whom no chain of games links with ``zero`` get no rating.
        zero: player whose rating is 0.
        virtual_draws: number of drawn games that are added for each pair.

    >>> table = GameTable()
    >>> table.add("strong", "weak", score=75, games=100)
    >>> round(elo_ratings(table, zero="weak", virtual_draws=0)["strong"].elo, 2)  # 400 log10(75 / 25)
    190.85
    """
    players = [zero]
    for linked in players:  # which grows
        players += sorted({player for pair in table if linked in pair for player in pair}.difference(players))
    ratings = {zero: Rating(0.0, 0.0, 0.0)}
    scores = torch.zeros(len(players), len(players), dtype=torch.float64)
    for (player, other), (score, games) in table.items():
        if player in players:
            row, column = players.index(player), players.index(other)
            scores[row, column] = score + virtual_draws / 2
            scores[column, row] = games - score + virtual_draws / 2
    strengths, information = _most_likely(scores)
    errors = torch.linalg.inv(information).diagonal().sqrt()
    for player, strength, error in zip(players[1:], strengths.tolist(), errors.tolist(), strict=True):
        ratings[player] = Rating(ELO * strength, ELO * (strength - Z95 * error), ELO * (strength + Z95 * error))
    return ratings


def _most_likely(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the strengths [P - 1] of the players after the first, whose strength is 0, and their information.

    A step of Newton's method that changes a pair's difference by up to ``d`` is shortened by ``log(1 + d) / d``, which
    cannot overshoot: logistic curves are self-concordant in the generalized sense (Sun and Tran-Dinh 2019).
    """
    games = scores + scores.T
    strength = torch.zeros(len(scores), dtype=scores.dtype)
    for _ in range(_STEPS):
        chance = torch.sigmoid(strength[:, None] - strength)
        weight = games * chance * (1 - chance)
        information = (torch.diag(weight.sum(1)) - weight)[1:, 1:]
        step = torch.zeros_like(strength)
        step[1:] = torch.linalg.solve(information, (scores - games * chance).sum(1)[1:])
        change = (step[:, None] - step).where(games > 0, 0.0).max()
        if change < _PRECISION:
            break
        strength += step * torch.log1p(change) / change
    return strength[1:], information
