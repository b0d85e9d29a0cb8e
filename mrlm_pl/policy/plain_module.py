"""A module without what sharding and checkpoints have put on it, for pickling and copying."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

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
    """A copy with memory of its own; of a module that is split over ranks (FSDP2), the whole one it was made of.

    Such a module must be held whole meanwhile; see :func:`mrlm_pl.policy.sharding.gathered`.
    """
    if not any(isinstance(part, FSDPModule) for part in module.modules()):
        return copy.deepcopy(module)
    file, tensors = io.BytesIO(), list[Tensor]()
    try:
        _Pickler(file, tensors).dump(module)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise EngineError(f"{type(module).__name__}, which is split over ranks, cannot be copied: {error}") from error
    file.seek(0)
    copied: M = _Unpickler(file, tensors).load()
    return copied


def reduced(item: object) -> Any:
    """For a pickler's ``reducer_override``: how a marked module is made again without its marks."""
    if isinstance(item, nn.Module) and _is_marked(item):
        return _new, (_plain_class(item),), _whole_state(item)
    return NotImplemented


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors, self._numbers = tensors, dict[int, int]()

    def persistent_id(self, item: Any) -> int | None:
        if not isinstance(item, Tensor):
            return None
        if id(item) not in self._numbers:
            self._numbers[id(item)] = len(self._tensors)
            self._tensors.append(item)
        return self._numbers[id(item)]

    def reducer_override(self, item: Any) -> Any:
        return reduced(item)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors, self._copies = tensors, dict[int, Tensor]()

    def persistent_load(self, number: int) -> Tensor:
        if number not in self._copies:
            tensor = self._tensors[number]
            copied = whole(tensor.detach()).clone()
            self._copies[number] = (
                nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
            )
        return self._copies[number]


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
