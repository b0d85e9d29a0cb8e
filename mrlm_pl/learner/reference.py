"""The reference policy, and the penalty for the divergence from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.reference import Reference
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.losses import kl_k3, kl_k3_importance_weighted, kl_k3_straight_through
from mrlm_pl.policy import Policy
from mrlm_pl.settings import at_least, one_of, positive

Estimator = Literal["k3", "k3_straight_through", "k3_importance_weighted"]
Placement = Literal["loss", "reward"]


@dataclass(frozen=True)
class KL:
    """The penalty for the KL divergence from the reference policy.

    Args:
        coefficient: weight ``beta`` of the penalty; 0 needs no reference policy.
        estimator: in the loss: ``k3``; ``k3_straight_through``, whose gradient is unbiased on-policy; or
            ``k3_importance_weighted``, whose gradient is unbiased for the tokens of any sampler (DeepSeek-V3.2, arXiv
            2512.02556). In the reward: k1.
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
        one_of(get_args(Estimator), "kl.", estimator=self.estimator)
        one_of(get_args(Placement), "kl.", placement=self.placement)
        if self.target is not None and not self.coefficient:
            raise ConfigurationError(
                f"kl.target is {self.target}, but kl.coefficient is 0, which no factor changes; start with 0.05, say"
            )

    def estimates(self, logp: Tensor, rows: PolicyBatch) -> Tensor:
        """Return the estimate [B, T] of the divergence in the loss, 0 outside the action mask."""
        assert rows.ref_logp is not None
        if self.estimator == "k3_importance_weighted":
            return kl_k3_importance_weighted(logp, rows.ref_logp, rows.behavior_logp, rows.action_mask)
        estimate = kl_k3 if self.estimator == "k3" else kl_k3_straight_through
        return estimate(logp, rows.ref_logp, rows.action_mask)


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


@dataclass(frozen=True)
class ReferenceSync:
    """Moves the reference policy after the policy, every n optimizer steps::

        reference <- decay reference + (1 - decay) policy

    The next rollout is compared with the new reference. With adapters their factors are averaged, not their products.

    Args:
        every: n; None keeps the weights before the first update.
        decay: 0 copies the policy; ``every: 1`` with a decay such as 0.99 is an exponential average.

    Raises:
        ConfigurationError: a value is out of range, or there is a decay without ``every``.
    """

    every: int | None = None
    decay: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, "reference_sync.", every=self.every)
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"reference_sync.decay is {self.decay}; it must be at least 0 and below 1")
        if self.decay and self.every is None:
            raise ConfigurationError(
                f"reference_sync.decay is {self.decay}, but reference_sync.every is not set; 1 is every optimizer step"
            )


class ReferencePolicy:
    """The reference weights of the policies, in this process or elsewhere.

    Args:
        used: whether the loss or the reward needs their log-probabilities.
        remote: the pool that computes them; None: this process.
        sync: how they move.

    Attributes:
        here: True if this process holds the weights and computes the log-probabilities.
        moves: True if they do not stay those before the first update.

    Raises:
        ConfigurationError: there is a pool, but nothing needs the log-probabilities; or the reference moves, but
            nothing needs it, or it is in a pool.
    """

    def __init__(
        self,
        used: bool = False,
        remote: Reference | None = None,
        sync: ReferenceSync = ReferenceSync(),
    ) -> None:
        self.sync, self.moves = sync, sync.every is not None
        if self.moves and not used:
            raise ConfigurationError(
                f"reference_sync.every is {sync.every}, but without a kl.coefficient there is no reference policy; set "
                "one above 0, or leave reference_sync out"
            )
        if self.moves and remote is not None:
            raise ConfigurationError(
                f"reference_sync.every is {sync.every}, but {type(remote).__name__} holds the initial weights; leave "
                "model.reference out, so that the learner holds the reference"
            )
        if remote is not None and not used:
            raise ConfigurationError(
                f"model.reference is {type(remote).__name__}, but without a kl.coefficient there is no reference "
                "policy; set one above 0, or leave model.reference out"
            )
        self.used, self.remote = used, remote
        self.here = used and remote is None

    def logprobs(self, policy: Policy, rows: PolicyBatch, trainer: Any) -> Tensor:
        """Return the log-probabilities [B, T] of a policy's trajectories under its reference, without gradient.

        Args:
            policy: the current policy, with its reference where this process holds it.
            rows: of the policy.
            trainer: of the run.
        """
        if self.remote is None:
            return policy.reference_logprobs(**rows.inputs())
        self.remote.meet_learner(LearnerPlace.of_trainer(trainer))
        return self.remote.logprobs(policy, rows)

    def follow(self, policies: Iterable[Policy], step: int) -> None:
        """Move the references of these policies, if they are due after an optimizer step; every rank must call this.

        Args:
            policies: with their references.
            step: number of completed optimizer steps.
        """
        if self.sync.every is not None and step % self.sync.every == 0:
            for policy in policies:
                policy.move_reference(self.sync.decay)
