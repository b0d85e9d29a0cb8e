"""The record of a team that reasons together, what its members are shown of it, and the numbers about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mrlm_environments.answers import Format, agree, is_right, vote
from mrlm_environments.collaborative_reasoning.masks import FAULTS

SHOWN_CHARACTERS = 4000
WORDS = ((0.3, "poor"), (0.6, "doubtful"), (0.8, "good"))
BEST_WORD = "excellent"
LEADER: Final = "leader"
SUMMARIZER: Final = "summarizer"
STUDENT: Final = "student"
ROLES = (LEADER, SUMMARIZER, STUDENT)


@dataclass(frozen=True)
class Answer:
    """One member's answer in one turn.

    Args:
        text: all of it.
        answer: the answer that it gives, and that is voted for; None where it gives none or is masked.
        faults: reasons why it is masked.
        right: whether the answer is the expected one; a masked one is not.
        score: in [0, 1]; 0 where it is masked.
    """

    text: str
    answer: str | None
    faults: frozenset[str]
    right: bool
    score: float


@dataclass(frozen=True)
class Round:
    """One turn: the solvers' answers in their order, and the leader's where there is one and it has spoken."""

    answers: Mapping[str, Answer]
    leader: Answer | None = None

    @property
    def spoken(self) -> dict[str, Answer]:
        """All answers, the leader's last."""
        return {**self.answers, **({LEADER: self.leader} if self.leader else {})}

    @property
    def given(self) -> list[str | None]:
        """The solvers' answers, None where there is no vote."""
        return [answer.answer for answer in self.answers.values()]


@dataclass(frozen=True)
class Record:
    """The played turns.

    Args:
        rounds: one for each turn.
        expected: the right answer.
        form: of the answers.
        planned: turns that there are at most.
    """

    rounds: tuple[Round, ...]
    expected: str
    form: Format
    planned: int

    def majority_is_right(self, number: int) -> bool:
        """Return whether the solvers' majority in a turn, counted from 0, is right."""
        return is_right(vote(self.rounds[number].given, self.form), self.expected, self.form)

    def team_is_right(self) -> bool:
        """Return whether the leader's last answer is right; without a leader or its answer, the last majority."""
        leader = self.rounds[-1].leader
        return leader.right if leader is not None and leader.answer is not None else self.majority_is_right(-1)

    def metrics(self, *, done: bool) -> dict[str, float]:
        """Return metrics of the turns; in a finished episode the last answers stand for turns that were not played."""
        found, totals, last = dict[str, float](), dict[str, float](), len(self.rounds)
        for turn in range(1, (self.planned if done else last) + 1):
            found |= self._turn(min(turn, last) - 1, turn)
            if 1 < turn <= last:
                for name, value in self._changes(turn - 1).items():
                    found[f"turn_{turn}_{name}"] = value
                    totals[name] = totals.get(name, 0.0) + value
        found |= totals
        spoken = [answer for played in self.rounds for answer in played.spoken.values()]
        found |= {name: float(sum(name in answer.faults for answer in spoken)) for name in FAULTS}
        return found | {
            "majority_accuracy": float(self.majority_is_right(-1)),
            "consensus": float(agree(self.rounds[-1].given, self.form)),
            "turns": float(len(self.rounds)),
            "answers": float(len(spoken)),
            "clipped_answers": float(sum(len(answer.text) > SHOWN_CHARACTERS for answer in spoken)),
        }

    def _turn(self, number: int, turn: int) -> dict[str, float]:
        played = self.rounds[number]
        return {
            **{f"{name}_turn_{turn}_accuracy": float(answer.right) for name, answer in played.spoken.items()},
            f"turn_{turn}_accuracy": sum(answer.right for answer in played.answers.values()) / len(played.answers),
            f"turn_{turn}_majority_accuracy": float(self.majority_is_right(number)),
        }

    def mean_scores(self) -> dict[str, float]:
        """Return the mean of the solvers' scores in each turn that was played."""
        return {
            f"turn_{turn}_score": sum(answer.score for answer in played.answers.values()) / len(played.answers)
            for turn, played in enumerate(self.rounds, start=1)
        }

    def _changes(self, number: int) -> dict[str, float]:
        """Count the solvers that a turn turned from wrong to right, of all that were wrong; and the reverse."""
        before, after = self.rounds[number - 1].answers, self.rounds[number].answers
        right = [name for name, answer in before.items() if answer.right]
        wrong = [name for name, answer in before.items() if not answer.right]
        return {
            "improved": float(sum(after[name].right for name in wrong)),
            "improved_of": float(len(wrong)),
            "declined": float(sum(not after[name].right for name in right)),
            "declined_of": float(len(right)),
        }


def in_words(score: float) -> str:
    """Return a score as one of four words.

    >>> [in_words(score) for score in (0.0, 0.3, 0.6, 0.8)]
    ['poor', 'doubtful', 'good', 'excellent']
    """
    return next((word for bound, word in WORDS if score < bound), BEST_WORD)


def shown_answers(answers: Mapping[str, Answer], *, scores: bool) -> list[str]:
    """Return the answers as others see them, each with its author and, with ``scores``, a word for its score."""
    return [
        f"{name} ({in_words(answer.score)}): {clipped(answer.text)}" if scores else f"{name}: {clipped(answer.text)}"
        for name, answer in answers.items()
    ]


def clipped(text: str) -> str:
    """Return the part of a text that others see: its end, where the answer is.

    >>> clipped("x" * 5000 + "7")[-2:], len(clipped("x" * 5000))
    ('x7', 4003)
    """
    return text if len(text) <= SHOWN_CHARACTERS else f"...{text[-SHOWN_CHARACTERS:]}"
