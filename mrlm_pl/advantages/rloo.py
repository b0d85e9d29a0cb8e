"""Leave-one-out advantage (RLOO)."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import group_deviations


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``r`` minus the mean of the other rewards of its group [B], which is ``G / (G - 1) (r - m)``.

    Exactly 0 in a group of one or of equal rewards.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2402.14740.

    >>> leave_one_out_advantages(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64)).tolist()
    [-3.0, -1.5, 4.5]
    """
    deviations, sizes, _ = group_deviations(rewards, group_ids)
    return (deviations * sizes / (sizes - 1).clamp(min=1)).to(torch.promote_types(rewards.dtype, torch.float32))
