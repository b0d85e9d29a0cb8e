"""A reward model of the Bradley-Terry kind: trained on pairs of a better and a worse answer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrlm_pl.errors import NonFiniteError
from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.critics import ScoreHead
from mrlm_pl.learner.given_answers import GivenAnswersAlgorithm
from mrlm_pl.losses import bradley_terry_loss, last_token_mask
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat


class PairwiseRewardModel(GivenAnswersAlgorithm):
    """A reward model trained on pairs of answers (arXiv 2203.02155; with a margin 2307.09288).

    ``s(w)`` and ``s(l)`` are the scores of the chosen and the rejected answer, the values before their last tokens::

        loss = mean over pairs of  -log sigmoid(s(w) - s(l) - margin) + centering (s(w) + s(l))^2

    Use it with ``PreferenceDataModule``; pairs of plain text are scored as a user's message and the answer to it. The
    folder ``policies/NAME`` of a run is a reward model. Only differences of scores are trained, so a score by itself
    says nothing, and ``sigmoid`` of it is not a probability of a right answer: :class:`CorrectnessModel` gives that.
    With ``centering`` the mean score is near 0.

    Logged under ``train/``: ``pair_accuracy`` (fraction of pairs whose chosen answer has the higher score; half for
    equal scores), ``margin`` (mean of ``s(w) - s(l)``), ``grad_norm`` and ``grad_norm_value``; under ``val/`` and
    ``test/`` ``loss``, ``pair_accuracy`` and ``margin``.

    Args:
        margin: difference of scores by which the chosen answer must win, in addition to the ``margin`` of its row.
        centering: weight of the squared sum of a pair's scores (arXiv 2312.09244).
        value_learning_rate: learning rate of the value head; None is the policy's.
        policies, optimization: see :class:`~mrlm_pl.learner.given_answers.GivenAnswersAlgorithm`.

    Raises:
        ConfigurationError: there are several policies, or a number is negative or not finite.
    """

    data_module = "PreferenceDataModule"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        *,
        margin: NonNegativeFloat = 0.0,
        centering: NonNegativeFloat = 0.0,
        value_learning_rate: NonNegativeFloat | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policies, **settings)
        self.margin, self.centering = margin, centering
        self.critic: ScoreHead = ScoreHead({}, self.learners, value_learning_rate)

    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores = self.critic.scores(name, rows, last_token_mask, self.global_step).sum(1)  # 0 but at the last tokens
        chosen, rejected = scores.view(-1, 2).unbind(1)
        gaps = (chosen - rejected).detach()
        if not (self.training or bool(gaps.isfinite().all())):  # training stops at a loss that is not finite
            raise NonFiniteError(
                f"{int((~gaps.isfinite()).sum())} of {len(gaps)} pairs have scores that are not finite; the reward "
                "model is broken: train it again"
            )
        won = ((gaps > 0).float() + 0.5 * (gaps == 0).float()).mean()
        margins = self.margin + not_none(rows.margins).view(-1, 2)[:, 0]
        losses = bradley_terry_loss(chosen, rejected, margin=margins)
        return losses + self.centering * (chosen + rejected).square(), {"pair_accuracy": won, "margin": gaps.mean()}
