"""The record of a team that reasons together, what its members are shown of it, and the numbers about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mrlm_environments.answers import Format, agree, is_right, vote
from mrlm_environments.collaborative_reasoning.masks import FAULTS

SHOWN_CHARACTERS = 4000
WORDS = ((0.3, "poor"), (0.6, "doubtful"), (0.8, "good"))
BEST_WORD = "excellent"
Role = Literal["leader", "summarizer", "student"]
LEADER, SUMMARIZER, STUDENT = get_args(Role)


@dataclass(frozen=True)
class Answer:
    """One member's answer in one turn.

    Args:
        text: whole text.
        answer: answer that it gives, and that is voted for; None where it gives none or is masked.
        faults: reasons why it is masked.
        right: whether the answer is the expected one; a masked one is not.
        score: score in [0, 1]; 0 where it is masked.
    """

    text: str
    answer: str | None
    faults: frozenset[str]
    right: bool
    score: float


@dataclass
class Record:
    """The played turns.

    Args:
        expected: right answer.
        form: form of the answers.
        planned: maximum number of turns.
        rounds: answers of each turn by their author: the solvers' in their order, then the leader's.
    """

    expected: str
    form: Format
    planned: int
    rounds: list[dict[str, Answer]] = field(default_factory=list)

    def solvers(self, number: int = -1) -> dict[str, Answer]:
        """Return the solvers' answers in a turn, counted from 0."""
        return {name: answer for name, answer in self.rounds[number].items() if name != LEADER}

    def given(self, number: int = -1) -> list[str | None]:
        """Return the votes of the solvers in a turn; None is not a vote."""
        return [answer.answer for answer in self.solvers(number).values()]

    def majority_is_right(self, number: int = -1) -> bool:
        """Return whether the solvers' majority in a turn is right."""
        return is_right(vote(self.given(number), self.form), self.expected, self.form)

    def team_is_right(self) -> bool:
        """Return whether the leader's last answer is right; without a leader or its answer, the last majority."""
        leader = self.rounds[-1].get(LEADER)
        return leader.right if leader is not None and leader.answer is not None else self.majority_is_right()

    def metrics(self, *, done: bool) -> dict[str, float]:
        """Return metrics of the turns; in a finished episode the last answers stand for turns that were not played."""
        found, totals, last = dict[str, float](), Counter[str](), len(self.rounds)
        for turn in range(1, (self.planned if done else last) + 1):
            number = min(turn, last) - 1
            solvers = self.solvers(number).values()
            found |= {f"{name}_turn_{turn}_accuracy": float(one.right) for name, one in self.rounds[number].items()}
            found[f"turn_{turn}_accuracy"] = sum(answer.right for answer in solvers) / len(solvers)
            found[f"turn_{turn}_majority_accuracy"] = float(self.majority_is_right(number))
            if 1 < turn <= last:
                changes = self._changes(number)
                found |= {f"turn_{turn}_{name}": float(count) for name, count in changes.items()}
                totals.update(changes)
        found |= {name: float(count) for name, count in totals.items()}
        spoken = [answer for played in self.rounds for answer in played.values()]
        found |= {name: float(sum(name in answer.faults for answer in spoken)) for name in FAULTS}
        return found | {
            "majority_accuracy": float(self.majority_is_right()),
            "consensus": float(agree(self.given(), self.form)),
            "turns": float(last),
            "answers": float(len(spoken)),
            "clipped_answers": float(sum(len(answer.text) > SHOWN_CHARACTERS for answer in spoken)),
        }

    def mean_scores(self) -> dict[str, float]:
        """Return the mean of the solvers' scores in each turn that was played."""
        turns = [self.solvers(number).values() for number in range(len(self.rounds))]
        return {
            f"turn_{turn}_score": sum(answer.score for answer in answers) / len(answers)
            for turn, answers in enumerate(turns, start=1)
        }

    def _changes(self, number: int) -> dict[str, int]:
        """Count the solvers that a turn turned from wrong to right, of all that were wrong; and the reverse."""
        before, after = self.solvers(number - 1), self.solvers(number)
        right = [name for name, answer in before.items() if answer.right]
        wrong = [name for name, answer in before.items() if not answer.right]
        return {
            "improved": sum(after[name].right for name in wrong),
            "improved_of": len(wrong),
            "declined": sum(not after[name].right for name in right),
            "declined_of": len(right),
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
