"""Normalization of advantages per task type, after the group advantage. Source: arXiv 2510.04206.

Task types that differ in length or difficulty give advantages of different spread; this brings each type to spread 1,
measured over its action tokens in the GLOBAL batch. Add up the ``task_moments`` of all micro-batches and ranks
first; each micro-batch is then normalized with the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages.whitening import Moments, masked_moments
from mrlm_pl.losses.masking import check_shape, masked_values

MIN_STD = 1e-6
"""A task type whose advantages spread less than this, in units of advantage, carries no scale and is left unchanged."""


TaskNormalization = Literal["none", "scale_only", "paper"]


def task_moments(advantages: Tensor, action_mask: Tensor, task_types: Tensor) -> dict[int, Moments]:
    """Return the moments of the advantages over the action tokens of each task type in this micro-batch.

    Args:
        advantages: [B, T]; not read outside the mask.
        action_mask: [B, T] bool.
        task_types: [B] int64, equal for rows of one type.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> task_moments(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), mask, torch.tensor([0, 4]))
    {0: Moments(count=2, mean=2.0, squared_sum=2.0), 4: Moments(count=1, mean=5.0, squared_sum=0.0)}
    """
    check_shape(action_mask.shape[:1], task_types=task_types)
    return {
        int(task): masked_moments(advantages, action_mask & (task_types == task)[:, None])
        for task in torch.unique(task_types)
    }


def unnormalizable_tasks(moments: Mapping[int, Moments]) -> list[int]:
    """Return the task types with one token or no spread, which the normalization leaves unchanged: warn about them.

    >>> unnormalizable_tasks({0: Moments(2, 2.0, 2.0), 4: Moments(1, 5.0, 0.0)})
    [4]
    """
    return [task for task, of_task in moments.items() if of_task.std <= MIN_STD]


def task_scaled_advantages(
    advantages: Tensor,
    action_mask: Tensor,
    task_types: Tensor,
    moments: Mapping[int, Moments] | None = None,
    *,
    center: bool = False,
) -> Tensor:
    """Return ``A / std`` of the row's task type [B, T], 0 outside the mask: never flips a sign, a zero stays 0.

    Args:
        advantages, action_mask, task_types: see ``task_moments``.
        moments: moments of the GLOBAL batch; None takes this micro-batch as the whole.
        center: compute ``(A - mean) / std``, the paper's form. Subtracting the token-weighted mean can flip the sign of
            an advantage when lengths differ.

    Raises:
        ValueError: a task type of this micro-batch is missing in ``moments``.

    >>> mask = torch.ones(2, 2, dtype=torch.bool)
    >>> task_scaled_advantages(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), mask, torch.tensor([0, 4]))  # std 1.4142
    tensor([[0.7071, 2.1213],
            [0.0000, 0.0000]])
    >>> task_scaled_advantages(torch.tensor([[1.0, 3.0]]), mask[:1], torch.tensor([0]), center=True)
    tensor([[-0.7071,  0.7071]])
    """
    check_shape(action_mask.shape[:1], task_types=task_types)
    if moments is None:
        moments = task_moments(advantages, action_mask, task_types)
    normalized = masked_values(advantages.detach(), action_mask)
    for task in torch.unique(task_types).tolist():
        of_task = moments.get(task)
        if of_task is None:
            raise ValueError(f"task type {task} has no moments: merge the task_moments of every piece of the batch")
        if of_task.std > MIN_STD:
            rows, shift = (task_types == task)[:, None], of_task.mean if center else 0.0
            normalized = torch.where(rows, (normalized - shift) / of_task.std, normalized)
    return masked_values(normalized, action_mask)
