"""Elo ratings with intervals from the results of games, by maximum likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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


def elo_ratings(table: GameTable, zero: str, virtual_draws: float = 1.0) -> dict[str, Rating]:
    """Return all players' ratings by the Bradley-Terry model, in which ``p = 1 / (1 + 10^(-difference / 400))``.

    The ratings are those of highest likelihood (Bradley and Terry 1952), with a draw as half a win for each. Every pair
    that met counts ``virtual_draws`` drawn games more, so that a player who won all games has a finite rating. The
    intervals are normal with the standard errors of the information matrix, for the difference to ``zero``; they take
    games as independent, and games with draws for as uncertain as games without.

    Args:
        table: results of games; a chain of games must link every player with ``zero``.
        zero: player whose rating is 0.
        virtual_draws: number of drawn games that are added for each pair.

    >>> table = GameTable()
    >>> table.add("strong", "weak", score=75, games=100)
    >>> round(elo_ratings(table, zero="weak", virtual_draws=0)["strong"].elo, 2)  # 400 log10(75 / 25)
    190.85
    """
    players = sorted({player for pair in table for player in pair})
    if not players:
        return {zero: Rating(0.0, 0.0, 0.0)}
    index = {player: position for position, player in enumerate(players)}
    scores = torch.zeros(len(players), len(players), dtype=torch.float64)
    for (player, other), (score, games) in table.items():
        row, column = index[player], index[other]
        scores[row, column] = score + virtual_draws / 2
        scores[column, row] = games - score + virtual_draws / 2
    free = torch.tensor([position for player, position in index.items() if player != zero], dtype=torch.int64)
    strength, information = _most_likely(scores, free)
    errors = torch.zeros(len(players), dtype=torch.float64)
    errors[free] = torch.linalg.inv(information).diagonal().sqrt()
    ratings = {}
    for player, position in index.items():
        elo, half = ELO * float(strength[position]), ELO * Z95 * float(errors[position])
        ratings[player] = Rating(elo, elo - half, elo + half)
    return ratings


def _most_likely(scores: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Return strengths [P] by Newton's method, 0 where not ``free`` [F], and the information [F, F] there."""
    games = scores + scores.T
    strength = torch.zeros(len(scores), dtype=torch.float64)
    for _ in range(_STEPS):
        gradient, information = _derivatives(scores, games, strength, free)
        step = torch.linalg.solve(information, gradient)
        size, before = 1.0, _log_likelihood(scores, strength)
        while True:
            moved = strength.clone()
            moved[free] += size * step
            if _log_likelihood(scores, moved) >= before or size < _PRECISION:
                break
            size /= 2
        strength = moved
        if float((size * step).abs().max()) < _PRECISION:
            break
    return strength, _derivatives(scores, games, strength, free)[1]


def _derivatives(scores: Tensor, games: Tensor, strength: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient [F] of the log-likelihood and its negative second derivative [F, F]."""
    chance = torch.sigmoid(strength[:, None] - strength[None, :])
    weight = games * chance * (1 - chance)
    information = torch.diag(weight.sum(1)) - weight
    return (scores - games * chance).sum(1)[free], information[free][:, free]


def _log_likelihood(scores: Tensor, strength: Tensor) -> float:
    return float((scores * torch.nn.functional.logsigmoid(strength[:, None] - strength[None, :])).sum())
