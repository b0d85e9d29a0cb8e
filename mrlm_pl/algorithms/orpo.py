"""Odds-ratio preference optimization: supervised fine-tuning and a preference in one loss, without a reference."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.given_answers import GivenAnswersAlgorithm
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import orpo_loss, preference_metrics
from mrlm_pl.policy import Policy
from mrlm_pl.settings import PositiveFloat


class ORPO(GivenAnswersAlgorithm):
    """Odds-ratio preference optimization (arXiv 2403.07691).

    For a pair with the answers ``w`` (chosen) and ``l`` (rejected), ``m(y)`` the mean log-probability of the tokens
    and ``odds(y) = p / (1 - p)`` with ``p = exp m(y)``::

        loss = mean over pairs of -m(w) - odds_weight log sigmoid(log odds(w) - log odds(l))

    There is no reference; begin with a model before its fine-tuning. Use it with ``PreferenceDataModule``. The metrics
    are those of :class:`~mrlm_pl.algorithms.dpo.DPO`, with rewards ``m(y)``.

    Args:
        policies: weights by name; one policy.
        optimization: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        odds_weight: weight of the odds ratio, the paper's ``lambda`` and TRL's ``beta``.

    Raises:
        ConfigurationError: there are several policies, or the weight is not above 0.
    """

    data_module = "PreferenceDataModule"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        odds_weight: PositiveFloat = 0.1,
    ) -> None:
        super().__init__(policies, optimization)
        self.check_no_dropout()
        self.odds_weight = odds_weight

    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = self.logp_means(name, rows).view(-1, 2)
        chosen, rejected = pairs.unbind(1)
        losses = orpo_loss(chosen, rejected, odds_weight=self.odds_weight)
        return losses, preference_metrics(chosen - rejected, pairs)
