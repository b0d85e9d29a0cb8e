"""The interface of text scorers for environments, judges and servers, without torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrlm_pl.environment.tasks import Shared
from mrlm_pl.episode import Message, Role
from mrlm_pl.errors import DataError, NonFiniteError

Conversation = Sequence[Message]

VERIFIER_SCORE = "verifier_score"
"""Metric of an episode's mean score in [0, 1]; a run compares it with the success rate."""


@dataclass(frozen=True)
class TextScore:
    """The score of a conversation, and whether its beginning was truncated to fit the window."""

    value: float
    truncated: bool = False


class TextScorer(Shared, ABC):
    """Scores conversations, higher for a better last reply. It is called from several threads, and must be picklable.

    Copies of an environment share a scorer and its model.
    """

    @property
    def probability(self) -> bool:
        """True if scores are probabilities in [0, 1]; else the sigmoid of a score is one."""
        return False

    @abstractmethod
    def score(self, messages: Conversation) -> TextScore:
        """Return the score of a question and its reply."""

    def score_batch(self, conversations: Sequence[Conversation]) -> list[TextScore]:
        """Return the scores of several conversations in order; by default one by one."""
        return [self.score(messages) for messages in conversations]

    def probabilities(self, conversations: Sequence[Conversation]) -> list[float]:
        """Return the scores as probabilities in order: the sigmoid of each score that is not a probability.

        Raises:
            NonFiniteError: a score is NaN or infinite, or a probability is outside [0, 1].
        """
        return [as_probability(found, self.probability) for found in self.score_batch(conversations)]

    def score_texts(self, questions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Return the probability of each answer to its question, in order; see :meth:`probabilities`.

        Raises:
            DataError: there are not as many answers as questions.
        """
        if len(questions) != len(answers):
            raise DataError(f"scores: there are {len(questions)} questions and {len(answers)} answers; give as many")
        return self.probabilities([exchange(*pair) for pair in zip(questions, answers, strict=True)])

    def close(self) -> None:
        """Free the scorer's resources; may be called twice, and the scorer may be used again."""


def exchange(question: str, answer: str) -> tuple[Message, Message]:
    """Return the conversation of a question and its answer."""
    return Message("user", question), Message("assistant", answer)


def agent_line(agent: str, message: Message) -> str:
    """Return an agent's message as a line of its team's conversation.

    >>> agent_line("row", Message("user", "C or A?"))
    '[row] user: C or A?'
    """
    return f"[{agent}] {message.role}: {message.content}"


def team_message(role: Role, messages: Mapping[str, Sequence[Message]]) -> Message:
    """Return messages by agent as one message of the team: a line for each, in the order of the agents' names."""
    lines = (agent_line(agent, message) for agent in sorted(messages) for message in messages[agent])
    return Message(role, "\n".join(lines))


def as_probability(score: TextScore, probability: bool) -> float:
    """Return a score as a probability; ``probability`` says that it already is one.

    >>> as_probability(TextScore(0.0), False), as_probability(TextScore(0.25), True)
    (0.5, 0.25)

    Raises:
        NonFiniteError: the score is NaN or infinite, or a probability outside [0, 1].
    """
    value = score.value
    if not math.isfinite(value) or (probability and not 0 <= value <= 1):
        wanted = "a probability in [0, 1]" if probability else "a finite number"
        raise NonFiniteError(f"a scorer gave {value!r} where {wanted} is expected; check its weights")
    return value if probability else sigmoid(value)


def sigmoid(value: float) -> float:
    """Return the logistic function, for any finite number.

    >>> sigmoid(0.0), sigmoid(-1000.0), sigmoid(1000.0)
    (0.5, 0.0, 1.0)
    """
    small = math.exp(-abs(value))
    return (1.0 if value >= 0 else small) / (1.0 + small)
