"""A device without float64, such as MPS, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WithoutFloat64(Tensor):
    """A tensor that claims to be on MPS, as does all that is computed from it; copies to the host are plain tensors.

    >>> x = torch.ones(2).as_subclass(WithoutFloat64)
    >>> x.device.type, x.cpu().double().sum(), x.to("cpu").device.type
    ('mps', tensor(2., dtype=torch.float64), 'cpu')
    >>> (2 * x).double()
    Traceback (most recent call last):
    TypeError: MPS has no float64; copy the numbers to the host first
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return torch.device("mps")
        if func is Tensor.cpu or (func is Tensor.to and torch.device(args[1]).type == "cpu"):
            return args[0].as_subclass(Tensor)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and result.dtype == torch.float64:
            raise TypeError("MPS has no float64; copy the numbers to the host first")
        return result
