"""The base of the losses on given answers: one policy, and a loss for each example of a batch."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import sequence_logp
from mrlm_pl.policy import Policy


class GivenAnswersAlgorithm(Algorithm):
    """Base of the algorithms that train one policy on given answers; a subclass sets :meth:`compare`.

    Args:
        policies: weights by name; one policy.
        optimization: see :class:`Algorithm`.

    Raises:
        ConfigurationError: there are several policies.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(policies, None, optimization)
        self.check_single_policy()

    @abstractmethod
    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses [N] of the examples, each of B / N consecutive rows, and the means of their metrics."""

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        losses, metrics = self.compare(name, rows)
        self.metrics.add_means(name, metrics, len(losses))
        return losses.sum() / (batch.totals[name].sequences * len(losses) / len(rows))

    def measure(self, prefix: str, batch: Batch) -> None:
        for name, rows in self.measured_rows(batch):
            losses, metrics = self.compare(name, rows)
            self.metrics.add_evaluation_means(prefix, {"loss": losses.mean(), **metrics}, len(losses))

    def logp_sums(self, name: str, rows: PolicyBatch) -> Tensor:
        """Return the log-probability [B] of each row's action tokens."""
        return sequence_logp(self.policies[name](rows.inputs()), rows.action_mask)

    def logp_means(self, name: str, rows: PolicyBatch) -> Tensor:
        """Return the mean log-probability [B] of each row's action tokens."""
        return self.logp_sums(name, rows) / rows.action_mask.sum(-1)
