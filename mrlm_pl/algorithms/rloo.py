"""REINFORCE with the other episodes of the task as the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.algorithms.base import LearningRateSchedule
from mrlm_pl.algorithms.policy_gradient import KLEstimator, PolicyGradient
from mrlm_pl.batch import PolicyBatch
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.losses import Correction, Reduction, policy_gradient_loss
from mrlm_pl.policy import Policy


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (arXiv 2402.14740).

    For the G episodes of a task with returns ``r_i``::

        A_i  = r_i - mean of the other G - 1
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a collection once (``data.passes`` and ``data.minibatches`` 1); GRPO with
    ``advantage: leave_one_out`` is the clipped form. What is logged is described at
    :class:`~mrlm_pl.algorithms.policy_gradient.PolicyGradient`.

    Args:
        policies, seats, schedule, warmup_steps, betas: see :class:`~mrlm_pl.algorithms.base.Algorithm`.
        reduction, max_length, kl_coefficient, kl_estimator, zero_variance, recompute_old_logp, correction,
            overlong_buffer: see :class:`~mrlm_pl.algorithms.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        reduction: Reduction = "token_mean",
        max_length: int | None = None,
        kl_coefficient: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        zero_variance: Literal["keep", "exclude"] = "keep",
        recompute_old_logp: bool | None = None,
        correction: Correction = Correction(),  # noqa: B008 (frozen)
        overlong_buffer: int = 0,
    ) -> None:
        super().__init__(
            policies,
            seats,
            schedule,
            warmup_steps,
            betas,
            reduction,
            max_length,
            kl_coefficient,
            kl_estimator,
            zero_variance,
            recompute_old_logp,
            correction,
            overlong_buffer,
        )

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        return self.group_credit(episodes, sampling, leave_one_out_advantages)

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}
