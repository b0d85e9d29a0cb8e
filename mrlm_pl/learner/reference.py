"""The reference policy, and the penalty for the divergence from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from mrlm_pl.engines.reference import Reference
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.ranks import learner_place
from mrlm_pl.losses import kl_k3, kl_k3_straight_through
from mrlm_pl.policy import Policy
from mrlm_pl.settings import at_least, one_of, positive

Estimator = Literal["k3", "k3_straight_through"]
Placement = Literal["loss", "reward"]
ESTIMATORS = {"k3": kl_k3, "k3_straight_through": kl_k3_straight_through}


@dataclass(frozen=True)
class KL:
    """The penalty for the KL divergence from the reference policy.

    Args:
        coefficient: weight ``beta`` of the penalty; 0 needs no reference policy.
        estimator: in the loss: ``k3``, or ``k3_straight_through`` with k2's (unbiased) gradient. In the reward: k1.
        placement: ``loss`` adds the estimate to each token's loss; ``reward`` subtracts it from each token's reward.
        target: divergence in nats per token towards which ``beta`` is steered; None keeps ``beta``; see
            :class:`KLController`.
        horizon: episodes in which ``beta`` changes by at most a fifth.

    Raises:
        ConfigurationError: an unknown name or a value out of range, or a target for a coefficient of 0.
    """

    coefficient: float = 0.0
    estimator: Estimator = "k3"
    placement: Placement = "loss"
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        at_least(0, "kl.", coefficient=self.coefficient)
        at_least(1, "kl.", horizon=self.horizon)
        positive("kl.", target=self.target)
        one_of(ESTIMATORS, "kl.", estimator=self.estimator)
        one_of(get_args(Placement), "kl.", placement=self.placement)
        if self.target is not None and not self.coefficient:
            raise ConfigurationError(
                f"kl.target is {self.target}, but kl.coefficient is 0, which no factor changes; start with 0.05, say"
            )


IN_REWARD = KL(placement="reward")
"""The default of algorithms with a reward for each token."""


class KLController:
    """Keeps the divergence from the reference policy near a target.

    After each rollout of n episodes with divergence ``KL`` in nats per token (arXiv 1909.08593, section 2.2)::

        beta <- beta (1 + clip(KL / target - 1, -.2, .2) n / horizon)

    Args:
        kl: the first ``beta``, the target (None keeps ``beta``) and the horizon.

    >>> controller = KLController(KL(0.1, target=0.5, horizon=100))
    >>> controller.update(1.0, episodes=50)    # twice the target: the factor is 1 + .2 * 50 / 100
    >>> round(controller.coefficient, 6)
    0.11
    """

    def __init__(self, kl: KL) -> None:
        self.kl, self.coefficient = kl, kl.coefficient

    def update(self, kl: float, episodes: int) -> None:
        """Adapt the coefficient to a rollout.

        Args:
            kl: mean divergence from the reference policy, in nats per token, over all ranks.
            episodes: number of episodes in this mean.
        """
        if self.kl.target is not None:
            error = min(max(kl / self.kl.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * episodes / self.kl.horizon


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
