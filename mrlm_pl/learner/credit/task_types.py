"""Task types of a batch's rows, and the advantages of each type on one scale. Source: arXiv 2510.04206."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import NO_MOMENTS, Moments
from mrlm_pl.advantages.task_normalization import (
    task_moments,
    task_scaled_advantages,
    task_standardized_advantages,
)
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.groups import group_numbers

TaskNormalization = Literal["none", "scale_only", "paper"]


def label_task_types(tables: Mapping[str, PolicyBatch], episodes: Sequence[Episode], names: Sequence[str]) -> None:
    """Set ``task_types`` of all rows: the place of their episode's environment among the names.

    Args:
        tables: rows by learner, made of these episodes.
        episodes: one collection.
        names: the environments of the run.
    """
    environments = {episode.group: episode.task.environment for episode in episodes}
    types = torch.tensor([names.index(environments[group]) for group in group_numbers(episodes)], dtype=torch.int64)
    for rows in tables.values():
        rows.task_types = types.to(rows.groups.device)[rows.groups]


def moments_by_task(rows: PolicyBatch) -> dict[int, Moments]:
    """Return moments of a policy's advantages over the action tokens of each task type that has any."""
    return {task: moments for task, moments in task_moments(*_parts(rows)).items() if moments.count}


def _leave(rows: PolicyBatch, moments: Mapping[int, Moments]) -> None:
    """Nothing is changed."""


def _scale(rows: PolicyBatch, moments: Mapping[int, Moments]) -> None:
    rows.advantages = task_scaled_advantages(*_parts(rows), _of_rows(rows, moments))


def _standardize(rows: PolicyBatch, moments: Mapping[int, Moments]) -> None:
    rows.advantages = task_standardized_advantages(*_parts(rows), _of_rows(rows, moments))


NORMALIZATIONS: dict[str, Callable[[PolicyBatch, Mapping[int, Moments]], None]] = {
    "none": _leave,
    "scale_only": _scale,
    "paper": _standardize,
}
"""What is made of a policy's advantages, in place, given the moments of each task type."""


def _parts(rows: PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
    assert rows.advantages is not None
    assert rows.task_types is not None
    return rows.advantages, rows.action_mask, rows.task_types


def _of_rows(rows: PolicyBatch, moments: Mapping[int, Moments]) -> dict[int, Moments]:
    """The moments of all types of the rows; one whose tokens are all left out of the loss has none."""
    assert rows.task_types is not None
    return {task: moments.get(task, NO_MOMENTS) for task in rows.task_types.unique().tolist()}
