"""A Lightning strategy: fully sharded data parallelism (FSDP2), on CPUs too."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mrlm_pl.durable_files import draft_of, force_to_disk, replacing
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.trainer.resume import NO_OPTIMIZER, check_checkpoint
from mrlm_pl.trainer.sharded_checkpoint import METADATA_FILE, check_sharded_checkpoint, sharded_shapes

COLLECTIVE_DEADLINE = timedelta(minutes=30)
SHARDED_CHECKPOINT_FILES = (METADATA_FILE, "meta.pt")
"""File of a sharded checkpoint with the places of all weights and everything else."""


class FSDP(ModelParallelStrategy):
    """Fully sharded data parallelism (FSDP2), optionally over groups of tensor-parallel ranks.

    ``--trainer.strategy fsdp`` on the command line. Lightning's own strategy of that name is FSDP1, which does not run
    on CPUs and cannot clip gradients per policy.

    Args:
        tensor_parallel_size: number of ranks that split every matrix of a layer; they play the same episodes.
        save_distributed_checkpoint: whether to write a checkpoint as a folder with a file per rank instead of a single
            file, for models that do not fit on one rank.
        timeout_minutes: time limit of a collective in minutes, after which the run ends with an error.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = False,
        timeout_minutes: float = COLLECTIVE_DEADLINE / timedelta(minutes=1),
    ) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.tensor_parallel_size = tensor_parallel_size

    def setup_environment(self) -> None:
        """Arrange the processes in groups of tensor-parallel ranks; the groups are data parallel.

        Raises:
            ConfigurationError: the number of processes is not a multiple of the tensor-parallel size.
        """
        processes = self.num_nodes * self.num_processes
        if processes % self.tensor_parallel_size:
            fault = f"tensor_parallel_size {self.tensor_parallel_size} does not divide the {processes} processes"
            raise ConfigurationError(f"{fault}; change it, or trainer.devices")
        self._data_parallel_size = processes // self.tensor_parallel_size
        super().setup_environment()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer; see :meth:`ModelParallelStrategy.optimizer_state`."""
        was_empty = not optimizer.state
        state = super().optimizer_state(optimizer)
        if was_empty:  # torch makes one, as after an update of zeros
            optimizer.state.clear()
            state = {**state, "state": {}} if state else state
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint; a folder of shards replaces an earlier one only when it is complete on disk.

        After a kill the earlier one remains, for a moment with the suffix ``.old``.
        """
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        final = Path(self.broadcast(filepath))
        with replacing(final) if self.is_global_zero else nullcontext(draft_of(final)) as draft:
            self.barrier()
            super().save_checkpoint(checkpoint, draft, storage_options)
            self.barrier()  # all shards are written
            if self.is_global_zero:
                for path in (*draft.iterdir(), draft):
                    force_to_disk(path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of either form; see :meth:`ModelParallelStrategy.load_checkpoint`.

        Raises:
            ConfigurationError: it is not a checkpoint, its folder of shards would run code, or the weights are not
                those of the module.
        """
        path = Path(self.broadcast(checkpoint_path))
        module = cast(Any, self.lightning_module)
        if path.is_dir():
            shapes = sharded_shapes(path)
        else:
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
            check_checkpoint(saved, path)
            if self._optimizers and not saved.get("optimizer_states"):
                raise ConfigurationError(NO_OPTIMIZER)
            shapes = {name: weight.shape for name, weight in saved["state_dict"].items()}
        if hasattr(module, "check_weights"):  # first: torch's errors name no option
            module.check_weights(shapes)
        optimizers, self._optimizers = self._optimizers, []
        try:
            checkpoint = super().load_checkpoint(path, weights_only is not False)
        finally:
            self._optimizers = optimizers
        for number, optimizer in enumerate(optimizers):
            if path.is_dir():
                _load_shards(optimizer, f"optimizer_{number}", path, module)
            else:
                _load_whole(optimizer, checkpoint["optimizer_states"][number])
        return checkpoint


# Lightning's own loading gives weights that no update has changed a state, as after an update, or fails, and takes
# the numbers of weights in an optimizer's state for those in the module, frozen ones included.


def _load_whole(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore an optimizer from its whole state."""
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    pairs = [pair for saved_group, group in groups for pair in zip(group["params"], saved_group["params"], strict=True)]
    state = {
        number: {key: _as_weight(value, weight) for key, value in saved["state"][number].items()}
        for number, weight in pairs
        if number in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": state})


def _as_weight(value: Any, weight: Tensor) -> Any:
    """Return this rank's part of a whole tensor that belongs to a weight, in its own memory; else the value itself."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    local = value.to(weight.device, copy=True)
    if not isinstance(weight, DTensor):
        return local
    return distribute_tensor(local, weight.device_mesh, weight.placements, src_data_rank=None)


def _load_shards(optimizer: Optimizer, name: str, folder: Path, module: Any) -> None:
    """Restore an optimizer from a sharded checkpoint."""
    saved = check_sharded_checkpoint(folder).state_dict_metadata
    target = get_optimizer_state_dict(module, optimizer)
    target["state"] = {
        weight: entries
        for weight, entries in cast(dict[str, Any], target["state"]).items()
        if all(f"{name}.state.{weight}.{key}" in saved for key in entries)
    }
    distributed_checkpoint.load({name: target}, checkpoint_id=folder)
    set_optimizer_state_dict(module, optimizer, target, options=StateDictOptions(cpu_offload=True, strict=False))
