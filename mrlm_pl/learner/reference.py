"""The reference policy of an algorithm: the policies' weights before the first update."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrlm_pl.engines.reference import Reference
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.ranks import learner_place
from mrlm_pl.policy import Policy


class ReferencePolicy:
    """The frozen initial weights of the policies, in this process or elsewhere.

    Args:
        used: whether the loss or the reward needs their log-probabilities.
        remote: the pool that computes them; None: this process.

    Attributes:
        here: True if this process holds the weights and computes the log-probabilities.

    Raises:
        ConfigurationError: there is a pool, but nothing needs the log-probabilities.
    """

    def __init__(self, used: bool = False, remote: Reference | None = None) -> None:
        if remote is not None and not used:
            raise ConfigurationError(
                f"model.reference is {type(remote).__name__}, but without a kl.coefficient there is no reference "
                "policy; set one above 0, or leave model.reference out"
            )
        self.used, self.remote = used, remote
        self.here = used and remote is None

    def logprobs(self, policy: Policy, rows: PolicyBatch, trainer: Any) -> Tensor:
        """Return the log-probabilities [B, T] of a policy's trajectories under its initial weights, without gradient.

        Args:
            policy: the current policy, with its initial weights where this process holds them.
            rows: of the policy.
            trainer: of the run.
        """
        if self.remote is None:
            return policy.reference_logprobs(**rows.inputs())
        self.remote.meet_learner(learner_place(trainer))
        return self.remote.logprobs(policy, rows)
