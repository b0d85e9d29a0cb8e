"""GRPO's group-normalized advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import group_deviations


def group_normalized_advantages(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, unbiased: bool = True
) -> Tensor:
    """``(r - m) / (s + eps)`` [B], with the mean ``m`` and standard deviation ``s`` of each row's group.

    A group of one, or of equal rewards, has exactly 0.

    Args:
        rewards: [B].
        group_ids: [B] int64; rows of a group need not be adjacent.
        eps: added to ``s``, in units of reward.
        unbiased: divide the squared deviations by ``G - 1``; False divides by ``G``.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2402.03300.

    >>> group_normalized_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([ 0.5000,  0.5000,  0.5000, -1.5000])
    """
    deviations, sizes, squared_sums = group_deviations(rewards, group_ids)
    degrees_of_freedom = (sizes - 1).clamp(min=1) if unbiased else sizes
    return (deviations / ((squared_sums / degrees_of_freedom).sqrt() + eps)).to(
        torch.promote_types(rewards.dtype, torch.float32)
    )
