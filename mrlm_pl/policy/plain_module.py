"""A module without what sharding and checkpoints have put on it, for pickling and copying."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mrlm_pl.errors import EngineError
from mrlm_pl.policy.sharding import whole

M = TypeVar("M", bound=nn.Module)
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


def own_copy(module: M) -> M:
    """Return a copy with memory of its own; of a module that is split over ranks (FSDP2), the whole one it was made of.

    Such a module must be held whole meanwhile; see :func:`mrlm_pl.policy.sharding.gathered`.
    """
    if not any(isinstance(part, FSDPModule) for part in module.modules()):
        return copy.deepcopy(module)
    file = io.BytesIO()
    pickler = _PlainPickler(file)
    try:
        pickler.dump(module)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise EngineError(f"{type(module).__name__}, which is split over ranks, cannot be copied: {error}") from error
    copies = TensorLoader(file.getvalue(), lambda name, _: whole(pickler.tensors[name].detach()).clone())
    copied: M = copies.load()
    return copied


class TensorNames:
    """A mixin of picklers: tensors are written as names, and modules without the marks of sharding and checkpoints."""

    tensors: dict[str, Tensor]
    """All tensors by name; those that :meth:`name` was not given are numbered."""

    def name(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors their names, before anything is written."""
        self.tensors, self._names = dict(tensors), {id(tensor): name for name, tensor in tensors.items()}

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        if id(item) not in self._names:
            name = f"tensor {len(self._names)}"
            self._names[id(item)], self.tensors[name] = name, item
        dtype = str(item.dtype).removeprefix("torch.")
        return self._names[id(item)], dtype, isinstance(item, nn.Parameter), item.requires_grad

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, nn.Module) and _is_marked(item):
            return _new, (_plain_class(item),), _whole_state(item)
        plain = getattr(super(), "reducer_override", None)
        return NotImplemented if plain is None else plain(item)


class _PlainPickler(TensorNames, pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.name({})


class TensorLoader(pickle.Unpickler):
    """Read what a pickler with :class:`TensorNames` wrote.

    Args:
        data: the bytes.
        make: makes a tensor from its name and dtype, once.

    Attributes:
        tensors: those that were made, by name.
    """

    def __init__(self, data: bytes, make: Callable[[str, torch.dtype], Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors: dict[str, Tensor] = {}
        self._make = make

    def persistent_load(self, item: tuple[str, str, bool, bool]) -> Tensor:
        name, dtype, parameter, trained = item
        if name not in self.tensors:
            tensor = self._make(name, getattr(torch, dtype))
            self.tensors[name] = nn.Parameter(tensor, requires_grad=trained) if parameter else tensor
        return self.tensors[name]


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _of_sharding(hook: Callable[..., Any]) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith(_OF_SHARDING)


def _is_marked(module: nn.Module) -> bool:
    """Return whether a module has something on it that is left behind."""
    hooks = any(_of_sharding(hook) for name in _HOOKS for hook in getattr(module, name).values())
    return hooks or isinstance(module, FSDPModule) or any(getattr(module, name) for name in _OF_CHECKPOINTS)


def _plain_class(module: nn.Module) -> type:
    """Return the class that sharding has put its own before."""
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
