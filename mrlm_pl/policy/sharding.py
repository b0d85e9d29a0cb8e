"""Sharded models: split them over ranks, and gather them while episodes are played.

A sharded model gathers each layer's weights from all ranks whenever the layer runs. That suits a training step, which
all ranks make together, but not generation: every token would cost a collective, and ranks with longer answers would
wait for the others forever. :func:`gathered` gathers the weights once, and the ranks run independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped

_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)


def shard(model: nn.Module, mesh: Any) -> None:
    """Split the weights of a model over the ranks of a mesh, layer by layer (FSDP2), in place; twice is once."""
    if isinstance(model, FSDPModule):
        return
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformers model, or none if it does not name them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def parallelize(model: nn.Module, mesh: Any) -> None:
    """Split the matrices of a Llama-like model's layers over the ranks of a mesh (tensor parallelism), in place.

    Raises:
        ConfigurationError: the model has other layers, such as those of ``lora``, ``int8`` or ``compile``, or its
            heads or feed-forward units cannot be divided evenly.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    blocks = layers(model)
    styles: dict[str, Any] = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
    styles |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())
    names = [name for name, _ in blocks[0].named_modules()] if blocks else []
    plan = {name: styles[leaf] for name in names if (leaf := name.rsplit(".", 1)[-1]) in styles}
    size = mesh.size()
    heads, width = (getattr(model.config, name, 0) for name in ("num_key_value_heads", "intermediate_size"))
    if len(plan) != len(styles) or any(not isinstance(parts, int) or parts % size for parts in (heads, width)):
        raise ConfigurationError(
            f"{type(model).__name__} cannot be split over {size} ranks: tensor parallelism needs layers with q_proj, "
            f"k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, and multiples of {size} key/value heads (it has "
            f"{heads}) and feed-forward units (it has {width}); set trainer.strategy.tensor_parallel_size to 1"
        )
    compiled = any(layer._compiled_call_impl is not None for layer in blocks)
    split = [module for layer in blocks for name, module in layer.named_modules() if name in plan]
    if compiled or not all(isinstance(module, nn.Linear) for module in split):
        raise ConfigurationError(
            "tensor parallelism splits plain linear layers alone; leave out the policies' lora, int8 and compile, or "
            "set trainer.strategy.tensor_parallel_size to 1"
        )
    for layer in blocks:
        parallelize_module(layer, mesh, plan)


def is_sharded(model: nn.Module) -> bool:
    """Return whether running the model needs the other ranks; not within :func:`gathered`."""
    return not _WHOLE.get() and any(isinstance(module, FSDPModule) for module in model.modules())


def is_split(model: nn.Module) -> bool:
    """Return whether the ranks hold parts of the model; its whole tensors are then temporary."""
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return sharded or any(isinstance(tensor, DTensor) for tensor in all_tensors(model).values())


@contextmanager
def gathered(models: Iterable[nn.Module]) -> Iterator[None]:
    """Gather these models' weights on every rank within the context; running them then needs no other rank.

    All ranks must enter together. Models that are not sharded do not change.
    """
    roots = list(models)
    sharded = [module for model in roots for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)
        for module in sharded:
            module.reshard()
            is_root = any(module is root for root in roots)  # the backward pass needs its weights next
            module.set_reshard_after_forward(not is_root, recurse=False)


def passes_on_all_ranks(model: nn.Module, passes: int) -> int:
    """Return the number of forward passes of every rank: the largest ``passes`` of all ranks."""
    if not is_sharded(model):
        return passes
    device = next(model.parameters()).device
    most = torch.tensor(passes, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm (0-dim) of all gradients together, over all ranks; every rank must call it."""
    meshes = grouped(
        (gradient.device_mesh if isinstance(gradient, DTensor) else None, gradient) for gradient in gradients
    )
    norms = [whole(torch.nn.utils.get_total_norm(members)) for members in meshes.values()]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) != 1 else norms[0]


def clip_norm(weights: Iterable[nn.Parameter], largest: float) -> None:
    """Scale the gradients of these weights, in place, so that their norm together is at most ``largest``."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        return
    factor = largest / (float(total_norm(gradients)) + 1e-6)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor with the parts of all ranks; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name.

    Unlike ``state_dict`` this includes buffers that are not saved, and leaves the gathered weights of a sharded model.
    """
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def world_size() -> int:
    """Return the number of processes that train together."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
