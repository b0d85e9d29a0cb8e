"""Statistics of rewards inside groups: the episodes of one task that are compared with each other.

Rows of a group need not be adjacent, and labels are arbitrary integers. B is the number of rows.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from mrlm_pl.errors import NonFiniteError


class GroupDeviations(NamedTuple):
    """Per row, all [B] fp64: the reward minus its group's mean, the group's size (each reward as often as it counts),
    its sum of squared deviations."""

    deviations: Tensor
    sizes: Tensor
    squared_sums: Tensor


def group_deviations(rewards: Tensor, group_ids: Tensor, counts: Tensor | None = None) -> GroupDeviations:
    """Deviation of each reward from its group's mean, exactly 0 where a group's rewards are all equal.

    Args:
        rewards: [B].
        group_ids: [B] int64.
        counts: [B] int64, how often each reward counts, at least once; None counts each once.

    Raises:
        NonFiniteError: a reward is NaN or infinite; the message names its row.
        ValueError: ``rewards`` and ``group_ids`` are not of one shape [B].

    Warns:
        RuntimeWarning: a group has one member, which has nothing to be compared with and so a deviation of 0.

    >>> group_deviations(torch.tensor([1.0, 0.1, 3.0, 0.1]), torch.tensor([4, 2, 4, 2])).deviations.tolist()
    [-1.0, 0.0, 1.0, 0.0]
    >>> group_deviations(torch.tensor([1.0, 4.0]), torch.tensor([0, 0]), torch.tensor([2, 1])).deviations.tolist()
    [-1.0, 2.0]
    """
    rewards = finite_rewards(rewards)
    sizes, index = _group_sizes(rewards, group_ids)
    if bool((sizes == 1).any()):
        warnings.warn(
            "a group of one episode has advantage 0 and teaches nothing: sample at least two episodes for each task, "
            "and more where an agent does not act in all of them",
            RuntimeWarning,
            stacklevel=3,
        )
    rewards = rewards.double()
    # Measured from the group's minimum: equal rewards then differ by exactly 0, which their rounded mean would spoil.
    minimum = torch.full_like(sizes, torch.inf, dtype=torch.float64).scatter_reduce(0, index, rewards, "amin")
    heights = rewards - minimum[index]
    weights = torch.ones_like(heights) if counts is None else counts.double()
    counted = torch.zeros_like(minimum).index_add(0, index, weights)
    totals = torch.zeros_like(minimum).index_add(0, index, weights * heights)
    deviations = heights - (totals / counted)[index]
    squared_sums = torch.zeros_like(minimum).index_add(0, index, weights * deviations.square())
    return GroupDeviations(deviations, counted[index], squared_sums[index])


def zero_variance_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """Number of groups of two or more whose rewards are all equal, so that they carry no signal.

    >>> zero_variance_groups(torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 5.0]), torch.tensor([3, 3, 3, 8, 8, 9]))
    1
    """
    rewards = finite_rewards(rewards)
    sizes, index = _group_sizes(rewards, group_ids)
    extremes = rewards.new_zeros(sizes.shape)
    lowest = extremes.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = extremes.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return int(((lowest == highest) & (sizes > 1)).sum())


def singleton_groups(group_ids: Tensor) -> int:
    """Number of groups with one member.

    >>> singleton_groups(torch.tensor([3, 3, 8, 9]))
    2
    """
    return int((torch.unique(group_ids, return_counts=True)[1] == 1).sum())


def finite_rewards(rewards: Tensor) -> Tensor:
    """``rewards`` [B] in fp32 (fp64 stays), once they are known to be finite numbers, one per row.

    Raises:
        NonFiniteError: names the first row whose reward is NaN or infinite.
        ValueError: ``rewards`` is not one-dimensional.

    >>> finite_rewards(torch.tensor([0.0, float("nan")]))
    Traceback (most recent call last):
    ...
    mrlm_pl.errors.NonFiniteError: the reward of row 1 is nan: a failed episode belongs out of the batch, not in it
    """
    if rewards.ndim != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give one number per row, [B]")
    bad_rows = (~rewards.isfinite()).nonzero()
    if bad_rows.numel():
        row = int(bad_rows[0])
        raise NonFiniteError(
            f"the reward of row {row} is {rewards[row].item()}: a failed episode belongs out of the batch, not in it"
        )
    return rewards.to(torch.promote_types(rewards.dtype, torch.float32))


def _group_sizes(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Size of each group, and each row's position in that list."""
    if group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)}; give one label per reward, {list(rewards.shape)}"
        )
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return sizes, index
