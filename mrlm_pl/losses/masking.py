"""Token masking shared by the losses, reductions, diagnostics and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before ``exp``: e^20 lies far beyond every clip range, and an infinite ratio would
turn the zero gradient of a clipped token into NaN."""


def check_shape(shape: Sequence[int], **tensors: Tensor) -> None:
    """Validate that tensors have this shape: broadcasting would hide a [B] tensor instead of a [B, T] one.

    Raises:
        ValueError: names the first one that has another shape.

    >>> check_shape((2, 3), values=torch.zeros(2))
    Traceback (most recent call last):
    ValueError: values has shape (2,); it must be (2, 3)
    """
    for name, tensor in tensors.items():
        if tensor.shape != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")


def masked_values(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` [B, T] in fp32 (fp64 stays), exactly 0 outside ``mask``, in the value and in the gradient.

    Filling before any arithmetic keeps NaN or infinity outside the mask from reaching a result or a gradient;
    multiplying by the mask would not.

    Raises:
        TypeError: ``mask`` is not boolean.
        ValueError: the shapes differ; see :func:`check_shape`.

    >>> masked_values(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]])).tolist()
    [[1.0, 0.0]]
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is a boolean tensor; got dtype {mask.dtype}: pass mask.bool()")
    check_shape(mask.shape, values=values)
    return values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(~mask, 0.0)


def masked_log_ratio(logp: Tensor, other_logp: Tensor, mask: Tensor) -> Tensor:
    """Return ``logp - other_logp`` [B, T], 0 outside ``mask``; ``other_logp`` is a constant to the gradient.

    >>> logp, other = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-1.0, float("-inf")]])
    >>> masked_log_ratio(logp, other, torch.tensor([[True, False]])).tolist()
    [[0.5, 0.0]]
    """
    return masked_values(logp, mask) - masked_values(other_logp.detach(), mask)


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """Return ``exp(log_ratio)`` with the exponent clamped to +- ``MAX_LOG_RATIO``; NaN stays NaN.

    >>> clamped_exp(torch.tensor([0.0, 1000.0])).isfinite().all().item()
    True
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def last_token_mask(action_mask: Tensor) -> Tensor:
    """Return [B, T] bool, True at the last action token of each row (nowhere in a row without action tokens).

    >>> last_token_mask(torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [[False, True, False], [False, False, False]]
    """
    later = action_mask.flip(-1).long().cumsum(-1).flip(-1)
    return action_mask & (later == 1)
