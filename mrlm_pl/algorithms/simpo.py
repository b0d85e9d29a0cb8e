"""Simple preference optimization: pairs compared by mean log-probabilities, without a reference."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.given_answers import GivenAnswersAlgorithm
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import preference_metrics, simpo_loss
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat


class SimPO(GivenAnswersAlgorithm):
    """Simple preference optimization (arXiv 2405.14734).

    For a pair with the answers ``w`` (chosen) and ``l`` (rejected), ``m(y)`` the mean log-probability of the tokens::

        loss = mean over pairs of -log sigmoid(beta (m(w) - m(l)) - margin)

    There is no reference. Use it with ``PreferenceDataModule``. The metrics are those of
    :class:`~mrlm_pl.algorithms.dpo.DPO`, with rewards ``beta m(y)``.

    Args:
        policies: weights by name; one policy.
        optimization: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        beta: scale of the rewards; the paper has 2 to 10.
        margin: difference by which the chosen answer must win, the paper's ``gamma``.

    Raises:
        ConfigurationError: there are several policies, or a value is out of range.
    """

    data_module = "PreferenceDataModule"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        beta: PositiveFloat = 2.0,
        margin: NonNegativeFloat = 1.0,
    ) -> None:
        super().__init__(policies, optimization)
        self.check_no_dropout()
        self.beta, self.margin = beta, margin

    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = self.logp_means(name, rows).view(-1, 2)
        gaps = pairs[:, 0] - pairs[:, 1]
        return simpo_loss(gaps, beta=self.beta, margin=self.margin), preference_metrics(gaps, self.beta * pairs)
