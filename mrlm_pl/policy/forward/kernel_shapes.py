"""Buckets for the shapes of matrix products where a CPU makes a kernel for every new shape.

oneDNN, which computes PyTorch's products in bf16 on a CPU with instructions for it, generates code for each shape and
keeps the last 1024 kernels (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``). Numbers of tokens differ in every rollout and in
every micro-batch, so most of its kernels would be used once.
"""

from __future__ import annotations

import torch

TOKENS = 64
"""Smallest step of a number of tokens in the learner."""


def bucket(count: int, step: int = 8) -> int:
    """Return the count rounded up to a multiple of the step, or of the eighth of a power of two where that is more.

    >>> [bucket(n) for n in (0, 1, 8, 9, 127, 129, 1000, 1025)]
    [0, 8, 8, 16, 128, 144, 1024, 1152]
    >>> [bucket(n, TOKENS) for n in (1, 65, 1000, 1025)]
    [64, 128, 1024, 1152]
    """
    step = max(step, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step


def kernels_by_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of this dtype, or of autocast's, take a new kernel for each new shape."""
    computed = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else dtype
    return device.type == "cpu" and computed == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
