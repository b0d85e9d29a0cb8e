"""Where an algorithm has its reference: the policies as they were before the first update."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.engines.reference import Reference
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.metrics import MetricLog
from mrlm_pl.learner.ranks import learner_place


class ReferenceUse(MetricLog):
    """A module with policies that may need log-probabilities of their initial weights.

    Attributes:
        reference: what computes them; None: this process.
    """

    reference: Reference | None = None

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs log-probabilities of the frozen initial weights."""
        return False

    @property
    def holds_reference(self) -> bool:
        """Whether this process computes them, and so needs the weights."""
        return self.uses_reference and self.reference is None

    def place_reference(self, reference: Reference | None) -> None:
        """Let ``reference`` compute them.

        Raises:
            ConfigurationError: the loss needs none.
        """
        if reference is not None and not self.uses_reference:
            raise ConfigurationError(
                f"model.reference is {type(reference).__name__}, but without a kl_coefficient {type(self).__name__} "
                "needs no reference; give one above 0, or leave model.reference out"
            )
        self.reference = reference

    def reference_logprobs(self, name: str, rows: PolicyBatch) -> Tensor:
        """Log-probabilities [B, T] of a policy's rows under its frozen reference; called without gradient."""
        policy = self.policies[name]
        if self.reference is None:
            logp: Tensor = policy.reference_logprobs(**rows.inputs())
            return logp
        self.reference.meet_learner(learner_place(self.trainer))
        return self.reference.logprobs(policy, rows)
