"""The interface of judges of debates: the debate, the verdict and its winner."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mrlm_pl.environment.tasks import Shared

Side = Literal["PRO", "CON"]
SIDES: tuple[Side, Side] = ("PRO", "CON")
OPPONENT: Mapping[Side, Side] = {"PRO": "CON", "CON": "PRO"}
TIE = "TIE"


@dataclass(frozen=True)
class Argument:
    """One side's speech in one turn."""

    side: Side
    text: str


@dataclass(frozen=True)
class Debate:
    """A debate that is over.

    Args:
        topic: claim that PRO argues for and CON against.
        arguments: arguments of all turns, in order.
        seed: seed of all randomness in judging it.
    """

    topic: str
    arguments: tuple[Argument, ...]
    seed: int = 0

    def texts(self, side: Side) -> tuple[str, ...]:
        """Return a side's arguments in order."""
        return tuple(argument.text for argument in self.arguments if argument.side == side)


@dataclass(frozen=True)
class Verdict:
    """A judge's scores.

    Args:
        parts: named parts of each side's score, the same names for both sides; the score is their sum, in [0, 1].
        metrics: named numbers for the log.
    """

    parts: Mapping[Side, Mapping[str, float]]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def score(self, side: Side) -> float:
        """Return a side's score in [0, 1]."""
        return math.fsum(self.parts[side].values())

    def winner(self, tie_margin: float = 0.0) -> str:
        """Return ``PRO``, ``CON``, or ``TIE`` where the scores differ by ``tie_margin`` or less.

        >>> Verdict({"PRO": {"judge": 0.75}, "CON": {"judge": 0.5}}).winner()
        'PRO'
        >>> Verdict({"PRO": {"judge": 0.75}, "CON": {"judge": 0.5}}).winner(tie_margin=0.25)
        'TIE'
        """
        margin = self.score("PRO") - self.score("CON")
        return TIE if abs(margin) <= tie_margin else "PRO" if margin > 0 else "CON"


class Judge(Shared, ABC):
    """Scores both sides of a debate. A judge keeps nothing of a debate, so that copies of an environment share it.

    It is called from several threads at the same time, and is pickled where environments live in host processes.
    """

    @abstractmethod
    def judge(self, debate: Debate) -> Verdict:
        """Return the scores of both sides."""

    def close(self) -> None:
        """Free the judge's resources; may be called twice, and the judge may be used again."""
