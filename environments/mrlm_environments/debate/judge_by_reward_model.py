"""The reward-model judge: each side's speeches are scored by a model that gives a text one number."""

from __future__ import annotations

from mrlm_environments.debate.judge import SIDES, Debate, Judge, Side, Verdict
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.reward_models.scorer import TextScore, TextScorer, as_probability, exchange
from mrlm_pl.settings import PositiveFloat


class RewardModelJudge(Judge):
    """Scores each side by itself: the question is the topic and the side, the reply all of the side's speeches.

    A side's score is ``sigmoid(value / scale)``: for a model of the Bradley-Terry kind the probability that the text is
    better than one of value 0. If the scorer's values are probabilities, as with a server's client, it is the
    value.

    Args:
        model: a :class:`~mrlm_pl.reward_models.RewardModel`, or any other :class:`~mrlm_pl.reward_models.TextScorer`.
        scale: scale of the model's values.

    Raises:
        ConfigurationError: the scale is not above 0, or not 1 for probabilities.
    """

    def __init__(self, model: TextScorer, scale: PositiveFloat = 1.0) -> None:
        if model.probability and scale != 1:
            raise ConfigurationError(
                f"reward-model judge: scale is {scale!r}, and the scores of {type(model).__name__} are probabilities, "
                "which have none; leave it out"
            )
        self.model, self.scale = model, scale

    def judge(self, debate: Debate) -> Verdict:
        """Return one part ``judge`` for each side; see :meth:`Judge.judge`.

        Raises:
            MRLMError: see the model's ``score_batch``.
            NonFiniteError: a score is NaN or infinite.
        """
        text_scores = self.model.score_batch([side_conversation(debate, side) for side in SIDES])
        scaled = [TextScore(item.value / self.scale) for item in text_scores]
        parts = {
            side: {"judge": as_probability(item, self.model.probability)}
            for side, item in zip(SIDES, scaled, strict=True)
        }
        return Verdict(parts, {"judge_truncated": sum(item.truncated for item in text_scores) / len(SIDES)})

    def close(self) -> None:
        """Free the model's resources."""
        self.model.close()


def side_conversation(debate: Debate, side: Side) -> tuple[Message, Message]:
    """Return the question that a side answers, and all that it said."""
    position = "for" if side == SIDES[0] else "against"
    question = f"Debate: {debate.topic}\nArgue {position} this."
    return exchange(question, "\n\n".join(debate.texts(side)))
