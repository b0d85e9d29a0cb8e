"""An algorithm: GRPO with the median of a group as its baseline, as a function and as a class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import Clip
from mrlm_pl.policy import Policy


def median_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return ``(r - median) / (mean |r - median| + 1e-6)`` [N] within each group.

    >>> median_advantages(torch.tensor([0.0, 0.0, 4.0]), torch.tensor([0, 0, 0])).round(decimals=4)
    tensor([0., 0., 3.])
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        deviations = rewards[groups == group] - rewards[groups == group].median()
        advantages[groups == group] = deviations / (deviations.abs().mean() + 1e-6)
    return advantages


class MedianGRPO(PolicyGradient):
    """GRPO with :func:`median_advantages`, a baseline that is robust to outliers.

    Args:
        policies, seats, clip, settings: see :class:`~mrlm_pl.algorithms.GRPO`.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        clip: Clip = Clip(),  # noqa: B008 (frozen)
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.clip = clip

    def advantages(self, returns: Returns) -> Tensor:
        """Return the advantages [N], one per agent and episode."""
        return median_advantages(returns.reward, returns.comparison)
