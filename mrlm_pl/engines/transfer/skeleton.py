"""A model without the memory of its weights, to be sent to another process and filled there."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from ray.cloudpickle import Pickler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mrlm_pl.errors import EngineError
from mrlm_pl.policy.plain_module import TensorLoader, TensorNames
from mrlm_pl.policy.sharding import whole


class Skeleton:
    """A module as bytes, with a name in place of every tensor, whatever its class and whatever adapters it has.

    Tensors that are shared, such as a head's with the embedding, are one again when it is rebuilt. A module that is
    split over ranks (FSDP2) becomes the whole one it was made of.

    Args:
        module: of classes that the other process can import; others go along by value where they can.

    Attributes:
        data: the bytes.
        passing: whether the module's tensors are put together from several ranks for a while only.

    Raises:
        EngineError: something in the module cannot be pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.name(named)
        try:
            pickler.dump(module)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EngineError(f"{type(module).__name__} cannot be sent to another process: {error}") from error
        self.data = file.getvalue()
        self._others = {name: tensor for name, tensor in pickler.tensors.items() if name not in named}
        sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        self.passing = sharded or any(isinstance(tensor, DTensor) for tensor in named.values())

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """All tensors of the module as it is now, by name; those that are neither parameter nor buffer are numbered.

        Of a tensor-parallel module every rank must ask.
        """
        found = {**dict(module.named_parameters()), **dict(module.named_buffers()), **self._others}
        return {name: whole(tensor) for name, tensor in found.items()}


def structure(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's structure: equal as long as a skeleton rebuilt earlier can take its tensors."""
    shapes = [(name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in module.named_parameters()]
    buffers = [(name, tuple(item.shape), item.dtype) for name, item in module.named_buffers()]
    return id(module), tuple(shapes), tuple(buffers)


def rebuild(data: bytes, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Return the module of a skeleton and its tensors by name, all on ``device`` and without memory yet.

    Parameters require a gradient where those of the original did: an engine sees by that which weights are trained.
    """
    loader = TensorLoader(data, lambda name, dtype: torch.empty(0, dtype=dtype, device=device))
    return loader.load(), loader.tensors


class _Pickler(TensorNames, Pickler):
    """Of Ray's, which writes classes that other processes cannot import by value."""
