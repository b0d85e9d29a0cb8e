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
from mrlm_pl.policy.plain_module import reduced
from mrlm_pl.policy.sharding import whole


class Skeleton:
    """A module as bytes, with a name in place of every tensor, whatever its class and whatever adapters it has.

    Tensors that are shared, such as a head's with the embedding, are one again when it is rebuilt. A module that is
    split over ranks (FSDP2) becomes the whole one it was made of.

    Args:
        module: of classes that the other process can import; others go along by value where they can.

    Attributes:
        data: the bytes.
        names: of all tensors.
        passing: whether the module's tensors are put together from several ranks for a while only.

    Raises:
        EngineError: something in the module cannot be pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._others: dict[str, Tensor] = {}
        names = {id(tensor): name for name, tensor in named.items()}
        file = io.BytesIO()
        pickler = _Pickler(file, names, self._others)
        try:
            pickler.dump(module)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EngineError(f"{type(module).__name__} cannot be sent to another process: {error}") from error
        self.data = file.getvalue()
        self.names = frozenset(named) | frozenset(self._others)
        sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        self.passing = sharded or any(isinstance(tensor, DTensor) for tensor in named.values())

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """All tensors of the module as it is now, by name; those that are neither parameter nor buffer are numbered.

        Of a tensor-parallel module every rank must ask.
        """
        found = {**dict(module.named_parameters()), **dict(module.named_buffers()), **self._others}
        return {name: whole(tensor) for name, tensor in found.items()}


def structure(module: nn.Module) -> tuple[Any, ...]:
    """What a skeleton depends on: equal as long as one rebuilt earlier can take the module's tensors."""
    shapes = [(name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in module.named_parameters()]
    buffers = [(name, tuple(item.shape), item.dtype) for name, item in module.named_buffers()]
    return id(module), tuple(shapes), tuple(buffers)


def rebuild(data: bytes, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """The module of a skeleton and its tensors by name, all on ``device`` and without memory yet.

    Parameters require a gradient where those of the original did: an engine sees by that which weights are trained.
    """
    unpickler = _Unpickler(io.BytesIO(data), device)
    return unpickler.load(), unpickler.tensors


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, names: dict[int, str], others: dict[str, Tensor]) -> None:
        super().__init__(file)
        self._names, self._others = names, others

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        if id(item) not in self._names:
            name = f"tensor {len(self._others)}"
            self._names[id(item)], self._others[name] = name, item
        dtype = str(item.dtype).removeprefix("torch.")
        return self._names[id(item)], dtype, isinstance(item, nn.Parameter), item.requires_grad

    def reducer_override(self, item: Any) -> Any:
        plain = reduced(item)
        return super().reducer_override(item) if plain is NotImplemented else plain


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self.tensors: dict[str, Tensor] = {}

    def persistent_load(self, item: tuple[str, str, bool, bool]) -> Tensor:
        name, dtype, parameter, trained = item
        if name not in self.tensors:
            empty = torch.empty(0, dtype=getattr(torch, dtype), device=self._device)
            self.tensors[name] = nn.Parameter(empty, requires_grad=trained) if parameter else empty
        return self.tensors[name]
