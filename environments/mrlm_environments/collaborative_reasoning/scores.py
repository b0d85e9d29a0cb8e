"""The score of an answer in [0, 1]: by its label, or by a model that gives a text one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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


def scored(
    scorer: Literal["label"] | TextScorer, question: str, texts: Sequence[str], right: Sequence[bool]
) -> tuple[list[float], int]:
    """Return the score of each answer of a turn, and the number of answers truncated to fit the model's window.

    Args:
        scorer: ``label`` for 1 where an answer is right and 0 where it is wrong, or a model.
        question: as it was posed.
        texts: the answers.
        right: whether they are, by the label.

    Raises:
        EnvironmentContractError: the model gave a value that is no probability, or another number of scores.
    """
    if isinstance(scorer, str) or not texts:
        return [float(holds) for holds in right], 0
    name = type(scorer).__name__
    try:
        found = scorer.score_batch([exchange(question, text) for text in texts])
        values = [as_probability(score, scorer.probability) for score in found]
    except NonFiniteError as error:  # of one answer: it costs the episode, not the run
        raise EnvironmentContractError(f"the scorer {name} failed: {error}") from error
    if len(values) != len(texts):
        raise EnvironmentContractError(f"the scorer {name} gave {len(values)} scores for {len(texts)} answers")
    return values, sum(score.truncated for score in found)
