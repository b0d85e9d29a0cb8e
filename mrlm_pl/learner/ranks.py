"""The collectives of a run; every rank must call those from :func:`gather_ranks` on together.

They are over the data-parallel ranks: tensor-parallel ranks hold the same data, which counts once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from mrlm_pl.errors import MRLMError

K = TypeVar("K", bound=Hashable)


def data_parallel_rank(trainer: Any) -> tuple[int, int]:
    """Return this process's data-parallel rank, and the number of such ranks."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return (int(kwargs["rank"]), int(kwargs["num_replicas"])) if kwargs else (0, 1)


def first_error(error: BaseException) -> BaseException:
    """Return the error that ends the run: another rank's if that failed first and this one lost its connection.

    If rank 0 fails and holds the store of the ranks, which ends with it, its error cannot be read.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return error
    store = torch.distributed.distributed_c10d._get_default_store()
    own = first = f"rank {torch.distributed.get_rank()} has failed with {type(error).__name__}: {error}"
    with suppress(RuntimeError):  # the store is gone
        # A script that has caught an error may train on: the ranks compare those of the same failure.
        failure = store.add(f"mrlm/failures of rank {torch.distributed.get_rank()}", 1)
        first = store.compare_set(f"mrlm/first error of failure {failure}", "", own).decode()
    return MRLMError(first) if first != own and isinstance(error, RuntimeError) else error


def gather_ranks(trainer: Any, value: Any) -> list[Any]:
    """Return the objects of all data-parallel ranks, in the order of the ranks; without a trainer this process's."""
    if trainer is None or trainer.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, value)
    return gathered[:: trainer.world_size // data_parallel_rank(trainer)[1]]


def sum_over_ranks(trainer: Any, addends: Mapping[K, Any]) -> dict[K, Any]:
    """Return the sum of each key's values over all ranks; a rank may lack keys that others have.

    Args:
        trainer: trainer of the run.
        addends: numbers, :class:`~mrlm_pl.advantages.Moments` or other values with a sum, by key.
    """
    totals: dict[K, Any] = {}
    for values in gather_ranks(trainer, dict(addends)):
        for key, value in values.items():
            totals[key] = totals[key] + value if key in totals else value
    return totals


def all_reduce_sum(trainer: Any, values: Tensor) -> Tensor:
    """Return the sum of ``values``, of the same shape on every rank, over all data-parallel ranks, on the CPU."""
    ranks = data_parallel_rank(trainer)[1]
    if ranks == 1:
        return values
    copies = trainer.world_size // ranks
    total: Tensor = trainer.strategy.reduce(values.to(trainer.strategy.root_device), reduce_op="sum")
    return total.cpu() / copies


def gather_at_first_rank(value: Any) -> list[Any]:
    """Return the values of all processes on the first one, which writes checkpoints; an empty list on the others."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    first = torch.distributed.get_rank() == 0
    values: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(value, values, dst=0)
    return values or []
