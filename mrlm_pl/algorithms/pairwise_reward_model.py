"""A reward model of the Bradley-Terry kind: trained on pairs of a better and a worse answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrlm_pl.errors import NonFiniteError
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.reward_model import RewardModelAlgorithm
from mrlm_pl.losses import bradley_terry_loss
from mrlm_pl.policy import Policy
from mrlm_pl.settings import at_least


class PairwiseRewardModel(RewardModelAlgorithm):
    """A reward model trained on pairs of answers (arXiv 2203.02155; with a margin 2307.09288).

    ``s(w)`` and ``s(l)`` are the scores of the chosen and the rejected answer, the values before their last tokens::

        loss = mean over pairs of  -log sigmoid(s(w) - s(l) - margin)

    Use it with ``PreferenceDataModule``; pairs of plain text are scored as a user's message and the answer to it. The
    folder ``policies/NAME`` of a run is a reward model. Only differences of scores are trained, so a score by itself
    says nothing, and ``sigmoid`` of it is no probability of a right answer: :class:`CorrectnessModel` gives that.

    Logged under ``train/``: ``pair_accuracy`` (share of pairs whose chosen answer has the higher score; half for equal
    scores), ``margin`` (mean of ``s(w) - s(l)``), ``grad_norm`` and ``grad_norm_value``; under ``val/`` and ``test/``
    ``loss``, ``pair_accuracy`` and ``margin``.

    Args:
        margin: how far the chosen answer must be ahead.
        value_learning_rate: learning rate of the value head; None is the policy's.
        policies, optimization: see :class:`~mrlm_pl.learner.reward_model.RewardModelAlgorithm`.

    Raises:
        ConfigurationError: there are several policies, or the margin is negative or not finite.
    """

    data_module = "PreferenceDataModule"

    def __init__(self, policies: dict[str, Policy] | None = None, *, margin: float = 0.0, **settings: Any) -> None:
        super().__init__(policies, **settings)
        at_least(0, margin=margin)
        self.margin = margin

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        losses, gaps = self._compare(name, rows)
        self.metrics.add_means(name, {"pair_accuracy": _share_won(gaps), "margin": gaps.mean()}, len(gaps))
        return losses.sum() / (batch.totals[name].sequences / 2)

    def _compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Losses [P] and differences of the scores [P] of pairs in rows 0 and 1, 2 and 3, ..."""
        chosen, rejected = self.scores(name, rows).view(-1, 2).unbind(1)
        return bradley_terry_loss(chosen, rejected, margin=self.margin), (chosen - rejected).detach()

    def measure(self, prefix: str, batch: Batch) -> None:
        for name, rows in self.measured_rows(batch).items():
            losses, gaps = self._compare(name, rows)
            if not bool(torch.isfinite(gaps).all()):
                raise NonFiniteError(
                    f"{int((~gaps.isfinite()).sum())} of {len(gaps)} pairs have scores that are not finite"
                )
            means = {"loss": losses.mean(), "pair_accuracy": _share_won(gaps), "margin": gaps.mean()}
            self.metrics.add_evaluation_means(prefix, means, len(gaps))


def _share_won(gaps: Tensor) -> Tensor:
    return ((gaps > 0).float() + 0.5 * (gaps == 0).float()).mean()
