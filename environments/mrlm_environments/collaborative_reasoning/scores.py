"""The score of an answer in [0, 1]: by its label, or by a model that gives a text one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from mrlm_pl.errors import EnvironmentContractError, NonFiniteError
from mrlm_pl.reward_models.scorer import TextScorer, as_probability, exchange

WORDS = ((0.3, "poor"), (0.6, "doubtful"), (0.8, "good"))
BEST_WORD = "excellent"


def in_words(score: float) -> str:
    """Return a score as one of four words.

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
        """Return each answer's score, and of how many the beginning was left out to fit the model's window.

        Args:
            question: as it was posed.
            texts: the answers.
            right: whether they are, by the label.

        Raises:
            EnvironmentContractError: the model gave something that is no probability, or another number of scores.
        """
        if isinstance(self.scorer, str) or not texts:
            return [float(holds) for holds in right], 0
        name = type(self.scorer).__name__
        try:
            found = self.scorer.score_batch([exchange(question, text) for text in texts])
            values = [as_probability(score, self.scorer.probability) for score in found]
        except NonFiniteError as error:  # of one answer: it costs the episode, not the run
            raise EnvironmentContractError(f"the scorer {name} failed: {error}") from error
        if len(values) != len(texts):
            raise EnvironmentContractError(f"the scorer {name} gave {len(values)} scores for {len(texts)} answers")
        return values, sum(score.truncated for score in found)

    def close(self) -> None:
        """Free the model's resources."""
        if not isinstance(self.scorer, str):
            self.scorer.close()
