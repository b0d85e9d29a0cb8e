"""Group reward-decoupled normalization: every reward component is normalized separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.advantages import component_normalized_advantages
from mrlm_pl.episode import Episode
from mrlm_pl.learner.credit.returns import Returns, returns_of
from mrlm_pl.learner.credit.rules import warn_of_absent_components
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy


class GDPO(PolicyGradient):
    """Group reward-decoupled normalization policy optimization (arXiv 2601.05242).

    For the G episodes of a task, with the sum ``c_ik`` of an agent's reward component k::

        z_i  = sum_k weight_k (c_ik - mean_k) / (std_k + 1e-6)
        A_i  = (z_i - mean of the rollout) / std of the rollout
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    The mean and standard deviation of a rollout are over a policy's action tokens on all ranks. The size of a
    component's rewards does not matter, only ``weights`` does.

    Args:
        weights: weight of each component by name, 1 if not named; a name that a rollout lacks causes a warning.
            ``overlong_penalty`` is the component of ``overlong_buffer``.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2
    whiten_advantages = True
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.weights = dict(weights or {})

    def advantages(self, returns: Returns) -> Tensor:
        """Return the advantages [N] of what each agent earned in each episode."""
        sums = _sums(returns)
        if self.overlong_buffer:
            sums["overlong_penalty"] = returns.bonus
        if self.weights:
            warn_of_absent_components(self.trainer, "weights", self.weights, sums, self.warned)
        return self._normalized(sums, returns)

    def _normalized(self, sums: Mapping[str, Tensor], returns: Returns) -> Tensor:
        weights = [self.weights.get(name, 1.0) for name in sums]
        return component_normalized_advantages(torch.stack(list(sums.values()), -1), returns.comparison, weights)

    def signal(self, group: Sequence[Episode]) -> tuple[Returns, Tensor]:
        returns = returns_of(group)
        return returns, self._normalized(_sums(returns), returns)


def _sums(returns: Returns) -> dict[str, Tensor]:
    return returns.components() or {"reward": returns.reward - returns.bonus}
