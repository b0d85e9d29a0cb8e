"""Count, on a CPU, the moments at which the host of a GPU would wait for it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Their result on the host, or the shape of their result, is known only when the device has finished.
_WAITING = {
    aten._local_scalar_dense,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_METHODS = ("tolist", "numpy", "cpu")


class DeviceWaits(TorchDispatchMode):
    """Pretend within the context that some tensors are on a device, and note every wait for it.

    The tensors given to :meth:`place`, and all that are computed from them or written with them, are on the device. A
    number or a copy of them on the host is a wait; so is an operation whose shape depends on their numbers. The modes
    of dispatch belong to a thread: only what runs in this one is seen, with its backward pass.

    Copies of the host's numbers to the device are not seen; ``torch.cuda.set_sync_debug_mode`` sees them on a GPU.

    Attributes:
        places: the operation and the line of this repository of each wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._patches = ExitStack()

    def place(self, tensors: Iterable[Tensor]) -> None:
        """Put tensors, with all that share their memory, on the device."""
        for tensor in tensors:
            tensor.untyped_storage().on_pretended_device = True  # type: ignore[attr-defined]

    def __enter__(self) -> DeviceWaits:
        for name in _METHODS:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._noted(name)))
        self._patches.enter_context(mock.patch.object(torch.Tensor, "to", self._moved()))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        here = any(_is_placed(value) for value in tree_leaves((args, kwargs)))
        if here and _waits(func, args, kwargs):
            self._note(func.__name__)
        result = func(*args, **kwargs)
        if here:
            self.place(value for value in tree_leaves(result) if isinstance(value, Tensor))
        return result

    def _noted(self, name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_placed(tensor):
                return original(tensor, *args, **kwargs)
            self._note(name)
            return _on_host(tensor) if name == "cpu" else original(_on_host(tensor), *args, **kwargs)

        return method

    def _moved(self) -> Any:
        original = torch.Tensor.to

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # The device itself is named by a torch.device, the host by its name.
            if "cpu" not in (*args, *kwargs.values()) or not _is_placed(tensor):
                return original(tensor, *args, **kwargs)
            self._note("to")
            return original(_on_host(tensor), *args, **kwargs)

        return method

    def _note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/mrlm_pl/" in frame.filename]
        self.places.append(f"{what} {frames[-1].filename}:{frames[-1].lineno}" if frames else what)


def _is_placed(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value.untyped_storage(), "on_pretended_device")


def _on_host(tensor: Tensor) -> Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    packet = func.overloadpacket
    if packet in _INDEXING:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave:
        return func._overloadname == "Tensor" and kwargs.get("output_size") is None
    return packet in _WAITING
