"""Mean-centred advantage, as in Dr.GRPO."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import group_deviations


def group_centered_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``r - m`` [B] with the mean ``m`` of each row's group; exactly 0 in a group of one or of equal rewards.

    Dr.GRPO pairs it with the ``constant_length`` reduction, so that neither a group's spread nor a response's length
    changes the weight of a token.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2503.20783.

    >>> group_centered_advantages(torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.zeros(4, dtype=torch.int64)).tolist()
    [-3.0, -2.0, 0.0, 5.0]
    """
    return group_deviations(rewards, group_ids).deviations.to(torch.promote_types(rewards.dtype, torch.float32))
