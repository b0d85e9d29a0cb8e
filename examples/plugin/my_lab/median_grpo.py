"""An algorithm: GRPO with the median of a group as its baseline, as a function and as a class."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl import PolicyGradient, Returns


def median_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return ``(r - median) / (mean |r - median| + 1e-6)`` [N] within each group.

    >>> median_advantages(torch.tensor([0.0, 0.0, 4.0]), torch.tensor([0, 0, 0])).round(decimals=4)
    tensor([0., 0., 3.])
    """
    advantages = torch.zeros_like(rewards)
    for group in set(groups.tolist()):
        deviations = rewards[groups == group] - rewards[groups == group].median()
        advantages[groups == group] = deviations / (deviations.abs().mean() + 1e-6)
    return advantages


class MedianGRPO(PolicyGradient):
    """GRPO with :func:`median_advantages`, a baseline that is robust to outliers.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.algorithms.GRPO`.
    """

    smallest_group = 2
    default_loss = "ppo"

    def advantages(self, returns: Returns) -> Tensor:
        """Return the advantages [N], one per agent and episode."""
        return median_advantages(returns.reward, returns.comparison)
