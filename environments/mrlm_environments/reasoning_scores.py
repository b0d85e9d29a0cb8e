"""What an answer is worth, in [0, 1]: by its label, or by a model that gives a text one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from mrlm_environments.reward_model_judge import TextScore, TextScorer, sigmoid
from mrlm_pl.episode import Message
from mrlm_pl.errors import EnvironmentContractError

WORDS = ((0.3, "poor"), (0.6, "doubtful"), (0.8, "good"))
BEST_WORD = "excellent"


def in_words(score: float) -> str:
    """A score as one of four words.

    >>> [in_words(score) for score in (0.0, 0.3, 0.6, 0.8)]
    ['poor', 'doubtful', 'good', 'excellent']
    """
    return next((word for bound, word in WORDS if score < bound), BEST_WORD)


class AnswerScorer:
    """Scores the answers of one turn together. Copies of an environment share it.

    Args:
        scorer: ``label`` for 1 where an answer is right and 0 where it is not, or a model.
    """

    def __init__(self, scorer: Literal["label"] | TextScorer) -> None:
        self.scorer = scorer

    def __deepcopy__(self, memo: dict[int, Any]) -> AnswerScorer:
        return self

    def scores(self, question: str, texts: Sequence[str], right: Sequence[bool]) -> tuple[list[float], int]:
        """Each answer's score, and of how many the beginning was left out to fit the model's window.

        Args:
            question: as it was posed.
            texts: the answers.
            right: whether they are, by the label.

        Raises:
            EnvironmentContractError: the model gave something that is no probability, or another number of scores.
        """
        if isinstance(self.scorer, str) or not texts:
            return [float(holds) for holds in right], 0
        asked = [(Message("user", question), Message("assistant", text)) for text in texts]
        found = self.scorer.score_batch(asked)
        name = type(self.scorer).__name__
        if len(found) != len(texts):
            raise EnvironmentContractError(f"{name} gave {len(found)} scores for {len(texts)} answers; mend the scorer")
        return [_probability(self.scorer, score, name) for score in found], sum(score.truncated for score in found)

    def close(self) -> None:
        """Free what the model holds."""
        if not isinstance(self.scorer, str):
            self.scorer.close()


def _probability(scorer: TextScorer, score: TextScore, name: str) -> float:
    # An infinite logit has a sigmoid, but no network that is well gives one.
    value = score.value if scorer.probability or not math.isfinite(score.value) else sigmoid(score.value)
    if not 0.0 <= value <= 1.0:
        raise EnvironmentContractError(
            f"the scorer {name} gave {score.value!r}, which is no {'probability' if scorer.probability else 'logit'}; "
            "the episode is not scored, mend the scorer"
        )
    return value
