"""All conversation between the processes of a run; every rank must call these functions together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


def data_parallel_rank(trainer: Any) -> tuple[int, int]:
    """Return this process's data-parallel rank and their number; tensor-parallel ranks have the same one."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return (int(kwargs["rank"]), int(kwargs["num_replicas"])) if kwargs else (0, 1)


def writes_files(trainer: Any) -> bool:
    """Return whether this process writes the files of its data: the first of its tensor-parallel ranks does."""
    _, shares = data_parallel_rank(trainer)
    return int(trainer.global_rank) % (trainer.world_size // shares) == 0


def gather_ranks(trainer: Any, own: Any) -> list[Any]:
    """Return the objects of all data-parallel ranks, in the order of the ranks.

    Tensor-parallel ranks hold the same: the first of them counts.
    """
    if trainer.world_size == 1:
        return [own]
    _, shares = data_parallel_rank(trainer)
    found: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, own)
    return found[:: trainer.world_size // shares]


def sum_over_ranks(trainer: Any, own: Mapping[K, Any]) -> dict[K, Any]:
    """Return the sum over all data-parallel ranks of each key's value; a rank may lack keys that others have.

    Args:
        trainer: of the run.
        own: numbers, :class:`~mrlm_pl.advantages.Moments` or other values with a sum, by key.
    """
    totals: dict[K, Any] = {}
    for values in gather_ranks(trainer, dict(own)):
        for key, value in values.items():
            totals[key] = totals[key] + value if key in totals else value
    return totals


def all_reduce_sum(trainer: Any, values: Tensor) -> Tensor:
    """Return the sum of ``values``, of the same shape on every rank, over all data-parallel ranks, on the CPU."""
    _, shares = data_parallel_rank(trainer)
    if shares == 1:
        return values
    # Tensor-parallel ranks have the same rows, each of which counts once.
    copies = trainer.world_size // shares
    total: Tensor = trainer.strategy.reduce(values.to(trainer.strategy.root_device), reduce_op="sum")
    return total.cpu() / copies


def gather_at_first_rank(value: Any) -> list[Any]:
    """Return the values of all ranks on the first rank, which writes checkpoints; an empty list on the others.

    Every rank must call it.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    first = torch.distributed.get_rank() == 0
    values: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(value, values, dst=0)
    return values or []
