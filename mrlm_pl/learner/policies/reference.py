"""The reference policy, and the penalty for the divergence from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mrlm_pl.advantages import NO_MOMENTS, masked_moments
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.credit.returns import acting_rows
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.losses import kl_k1, kl_k3, kl_k3_importance_weighted, kl_k3_straight_through, masked_values
from mrlm_pl.policy import Policy
from mrlm_pl.settings import FractionBelowOne, NonNegativeFloat, PositiveFloat, PositiveInt, Settings

Estimator = Literal["k3", "k3_straight_through", "k3_importance_weighted"]
Placement = Literal["loss", "reward"]


@dataclass(frozen=True)
class KL(Settings):
    """The penalty for the KL divergence from the reference policy.

    Args:
        coefficient: weight ``beta`` of the penalty; 0 needs no reference policy.
        estimator: estimator in the loss: ``k3``; ``k3_straight_through``, whose gradient is unbiased on-policy; or
            ``k3_importance_weighted``, whose gradient is unbiased for the tokens of any sampler (DeepSeek-V3.2, arXiv
            2512.02556); or a function (in a configuration its name, such as ``./my_file.py:my_kl``) of the policy's and
            the reference's log-probabilities and the action mask [B, T] that returns [B, T]. In the reward: k1.
        placement: ``loss`` adds the estimate to each token's loss; ``reward`` subtracts it from each token's reward,
            which algorithms without rewards of tokens reject. None is ``reward`` for those with them, else ``loss``.
        target: divergence in nats per token towards which ``beta`` is steered; None keeps ``beta``; see
            :meth:`adapted`.
        horizon: episodes in which ``beta`` changes by at most a fifth.

    Raises:
        ConfigurationError: an unknown name or a value out of range, a target for a coefficient of 0, or an
            estimator for the reward.
    """

    coefficient: NonNegativeFloat = 0.0
    estimator: Estimator | Callable[..., Any] = "k3"
    placement: Placement | None = None
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        if self.placement == "reward" and self.estimator != "k3":
            raise ConfigurationError(
                f"kl.estimator is {self.estimator!r}, but with `kl.placement: reward` the estimate is k1; leave "
                "kl.estimator out, or set kl.placement to loss"
            )
        if self.target is not None and not self.coefficient:
            raise ConfigurationError(
                f"kl.target is {self.target}, but kl.coefficient is 0, which no factor changes; start with 0.05, say"
            )

    def estimates(self, logp: Tensor, rows: PolicyBatch) -> Tensor:
        """Return the estimate [B, T] of the divergence in the loss, 0 outside the action mask."""
        reference, mask = not_none(rows.ref_logp), rows.action_mask
        if self.estimator == "k3_importance_weighted":
            return kl_k3_importance_weighted(logp, reference, rows.behavior_logp, mask)
        if not callable(self.estimator):
            return (kl_k3 if self.estimator == "k3" else kl_k3_straight_through)(logp, reference, mask)
        estimates = self.estimator(logp, reference, mask)
        if getattr(estimates, "shape", None) != logp.shape:
            name = getattr(self.estimator, "__name__", self.estimator)
            raise ConfigurationError(
                f"kl.estimator: the function {name} returned {estimates!r:.80}; it must return an estimate for each "
                f"token, a tensor {list(logp.shape)}"
            )
        return masked_values(estimates, mask)

    def adapted(self, beta: float, divergence: float, episodes: int) -> float:
        """Return ``beta`` after a rollout, steered towards the target (arXiv 1909.08593)::

            beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1))

        Args:
            beta: coefficient before the rollout; without a target it stays.
            divergence: mean divergence ``KL`` in nats per token, over all ranks.
            episodes: number n of episodes in this mean.

        >>> kl = KL(0.1, target=0.5, horizon=100)
        >>> round(kl.adapted(0.1, 1.0, episodes=50), 6)    # twice the target: the factor is 1 + 0.2 * 50 / 100
        0.11
        """
        if self.target is None:
            return beta
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        return beta * (1.0 + error * min(episodes / self.horizon, 1.0))


class KLPenalty:
    """The penalty for the divergence of each policy from its reference, with its own coefficient.

    Args:
        kl: settings of the penalty.
        policies: names of the policies.

    Attributes:
        coefficients: current coefficient of each policy.
    """

    def __init__(self, kl: KL, policies: Sequence[str]) -> None:
        self.settings = kl
        self.coefficients = dict.fromkeys(policies, kl.coefficient)

    def of_rewards(self, name: str, rows: PolicyBatch) -> Tensor:
        """Return the penalty [B, T] in a policy's rewards: ``beta (log pi_old - log pi_ref)``."""
        return self.coefficients[name] * kl_k1(rows.old_logp, not_none(rows.ref_logp), rows.action_mask)

    def of_losses(self, name: str, logp: Tensor, rows: PolicyBatch) -> Tensor:
        """Return the penalty [B, T] in a policy's losses, given its log-probabilities ``logp`` [B, T]."""
        return self.coefficients[name] * self.settings.estimates(logp, rows)

    def steer(
        self,
        metrics: Metrics,
        policies: Sequence[str],
        batches: Mapping[str, PolicyBatch],
        episodes: Sequence[Episode],
    ) -> None:
        """Log the divergence from the reference policies over all ranks, and update the coefficients with it.

        Args:
            metrics: metrics of the algorithm.
            policies: names of the trained policies, in the same order on all ranks.
            batches: trajectories by policy; a policy without any on this rank is absent.
            episodes: episodes of the rollout.
        """
        moments_here: dict[tuple[str, str], Any] = {}
        for name, rows in batches.items():
            if rows.ref_logp is not None:
                divergence = kl_k1(rows.old_logp, rows.ref_logp, rows.action_mask)
                moments_here[name, "kl"] = masked_moments(divergence, rows.action_mask)
                moments_here[name, "episodes"] = len({id(e) for e, row in acting_rows(episodes) if row.policy == name})
        totals = sum_over_ranks(metrics.trainer, moments_here)
        for name in policies:
            kl, beta = totals.get((name, "kl"), NO_MOMENTS).mean, self.coefficients[name]
            metrics.rollout[metrics.name("reference_kl", name)] = kl
            metrics.rollout[metrics.name("kl_coefficient", name)] = beta
            self.coefficients[name] = self.settings.adapted(beta, kl, totals.get((name, "episodes"), 0))

    def load(self, coefficients: Mapping[str, float]) -> None:
        """Restore the coefficients; a fixed one takes the configured value, even if that has changed."""
        if self.settings.target is not None:
            self.coefficients |= {name: beta for name, beta in coefficients.items() if name in self.coefficients}


@dataclass(frozen=True)
class ReferenceSync(Settings):
    """Moves the reference policy after the policy, every n optimizer steps::

        reference <- decay reference + (1 - decay) policy

    The next rollout is compared with the new reference. With adapters their factors are averaged, not their products.

    Args:
        every: number n of optimizer steps between two moves; None keeps the weights before the first update.
        decay: 0 copies the policy; ``every: 1`` with a decay such as 0.99 is an exponential average.

    Raises:
        ConfigurationError: a value is out of range, or there is a decay without ``every``.
    """

    every: PositiveInt | None = None
    decay: FractionBelowOne = 0.0

    def __post_init__(self) -> None:
        if self.decay and self.every is None:
            raise ConfigurationError(
                f"reference_sync.decay is {self.decay}, but reference_sync.every is not set; 1 is every optimizer step"
            )


class ReferencePolicy:
    """The reference weights of the policies.

    Args:
        used: whether the loss or the reward needs reference log-probabilities.
        sync: schedule by which the reference moves.

    Attributes:
        moves: True if the reference moves during training.

    Raises:
        ConfigurationError: the reference moves, but nothing needs it.
    """

    def __init__(self, used: bool = False, sync: ReferenceSync = ReferenceSync()) -> None:
        self.used, self.sync, self.moves = used, sync, sync.every is not None
        if self.moves and not used:
            raise ConfigurationError(
                f"reference_sync.every is {sync.every}, but without a kl.coefficient there is no reference policy; set "
                "one above 0, or leave reference_sync.every out"
            )

    def check_int8(self, name: str) -> None:
        """Validate that a policy whose reference is to be held in int8 has one that does not move.

        Raises:
            ConfigurationError: it has none, or it moves.
        """
        if self.moves or not self.used:
            why = "the run keeps no reference copy of its weights, as without a kl.coefficient"
            if self.moves:
                why = f"its reference moves every {self.sync.every} steps, by less than the steps of int8"
            raise ConfigurationError(f"policy {name!r}: int8 is 'reference', but {why}; leave `int8` out")

    def follow(self, policies: Iterable[Policy], step: int) -> None:
        """Move the references of these policies if a move is due after an optimizer step; every rank must call this.

        Args:
            policies: policies with their references.
            step: number of completed optimizer steps.
        """
        if self.sync.every is not None and step % self.sync.every == 0:
            for policy in policies:
                policy.move_reference(self.sync.decay)
