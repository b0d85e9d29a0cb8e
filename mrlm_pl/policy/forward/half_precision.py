"""Half precision on a CPU, whose instructions for it are in the matrix products of projections alone."""

from __future__ import annotations

import torch


def state_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of queries, keys, values and element-wise results beside projections in ``dtype``.

    A CPU takes longer in half precision than in float32 for attention and for element-wise operations: with AMX the
    attention's backward pass three times as long (torch 2.13, 32 rows of 128 tokens).

    >>> state_dtype(torch.bfloat16, torch.device("cpu")), state_dtype(torch.bfloat16, torch.device("cuda"))
    (torch.float32, torch.bfloat16)
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and device.type == "cpu" else dtype
