"""A model without the memory of its weights, to be sent to another process and filled there."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from ray.cloudpickle import Pickler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mrlm_pl.errors import EngineError
from mrlm_pl.policy.sharding import whole

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_SHARDING = "torch.distributed"
"""Hooks from here gather the parts of a sharded model; what is rebuilt is whole."""

_OF_CHECKPOINTS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Hooks that a model which only generates never runs."""

_STATE_OF_SHARDING = ("__composable_api_state_key", "_is_fsdp", "_fsdp")


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
        if isinstance(item, nn.Module) and _is_marked(item):
            return _new, (_plain_class(item),), _whole_state(item)
        return super().reducer_override(item)


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


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _of_sharding(hook: Callable[..., Any]) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith(_OF_SHARDING)


def _is_marked(module: nn.Module) -> bool:
    """Whether a module has something on it that is left behind."""
    hooks = any(_of_sharding(hook) for name in _HOOKS for hook in getattr(module, name).values())
    return hooks or isinstance(module, FSDPModule) or any(getattr(module, name) for name in _OF_CHECKPOINTS)


def _plain_class(module: nn.Module) -> type:
    """The class that sharding has put its own before."""
    if not isinstance(module, FSDPModule):
        return type(module)
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


def _whole_state(module: nn.Module) -> dict[str, Any]:
    state = {key: value for key, value in module.__dict__.items() if not key.startswith(_STATE_OF_SHARDING)}
    for name in _OF_CHECKPOINTS:
        state[name] = OrderedDict()
    for name in _HOOKS:
        kept = {key: hook for key, hook in state[name].items() if not _of_sharding(hook)}
        state[name] = type(state[name])(kept)
    for name in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
        base = "_forward_pre_hooks" if "pre" in name else "_forward_hooks"
        state[name] = type(state[name])((key, on) for key, on in state[name].items() if key in state[base])
    return state
