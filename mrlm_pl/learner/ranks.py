"""What the processes of a run tell each other."""

from __future__ import annotations

from typing import Any

import torch

from mrlm_pl.engines.learner_place import LearnerPlace


def data_parallel_rank(trainer: Any) -> tuple[int, int]:
    """Which share of the data this process has, and how many shares there are; tensor-parallel ranks have the same."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return (int(kwargs["rank"]), int(kwargs["num_replicas"])) if kwargs else (0, 1)


def learner_place(trainer: Any) -> LearnerPlace:
    """Where the processes of a run compute on this machine."""
    on_gpu = trainer.strategy.root_device.type == "cuda"
    devices = tuple(trainer.device_ids) if on_gpu else ()
    return LearnerPlace(devices, int(trainer.local_rank), int(trainer.num_devices))


def each_share(trainer: Any, own: Any) -> list[Any]:
    """What the ranks hold, in the order of their shares of the data, one for each share; every rank must ask.

    Tensor-parallel ranks hold the same: the first of them speaks.
    """
    _, shares = data_parallel_rank(trainer)
    if trainer.world_size == 1:
        return [own]
    found: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, own)
    return found[:: trainer.world_size // shares]
