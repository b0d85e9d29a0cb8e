"""Devices: their fastest dtypes and shapes, transfers that wait for none of their work, and equal random weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError, first_line
from mrlm_pl.policy.forward import products

TOKENS = 64
"""Smallest step of a number of tokens in the learner; see :func:`padded_tokens`."""

MIN_FREED_WEIGHTS = 2**22
"""Fewest weights, over all policies, whose memory is freed between generation and updates.

Mapping their memory again takes 4 % of a step of 3 million weights, and less than is measurable from 6 million on.
"""


def on_device(numbers: Tensor | Sequence[int], device: torch.device | str) -> Tensor:
    """Return the host's numbers on a device; the host does not wait for the work that the device has still to do.

    CUDA copies from pageable memory only when all earlier work is done, from pinned memory in order with it.

    >>> on_device([3, 5], torch.device("cpu"))
    tensor([3, 5])
    """
    host = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        # numbers that are one place of memory cannot be pinned, and those with gaps are copied by way of the host
        return host.contiguous().pin_memory().to(device, non_blocking=True)
    return host.to(device)


def usable_device(name: str) -> torch.device:
    """Return a device by its name; ``auto`` prefers an accelerator, and ``cuda`` is this rank's GPU.

    Raises:
        ConfigurationError: it cannot be used.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = "cpu" if accelerator is None else accelerator.type
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cuda" and rank < torch.cuda.device_count():  # a launcher may show each rank one GPU alone
        name = f"cuda:{rank}"
    try:
        # the device of a tensor has an index: that of a thread's current GPU may change
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device: {name!r} cannot be used: {first_line(error)}") from error


@contextmanager
def drawn_on_host(seed: int) -> Iterator[None]:
    """Make and draw weights on the CPU from a seed within the context, on every machine the same ones.

    Lightning makes models on their device and in their dtype, in which the generators would draw others.
    """
    from transformers.modeling_utils import local_torch_dtype

    with local_torch_dtype(torch.float32), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which attention is computed beside projections in ``dtype``.

    On a CPU attention takes longer in half precision than in float32: with AMX its backward pass takes three times as
    long (torch 2.13, 32 rows of 128 tokens).

    >>> [attention_dtype(torch.bfloat16, torch.device(name)) for name in ("cpu", "cuda")]
    [torch.float32, torch.bfloat16]
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and device.type == "cpu" else dtype


def computes_bf16(device: torch.device) -> bool:
    """Return False for a CPU without instructions for bf16, which it emulates many times slower than float32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kernels_by_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of this dtype, or of autocast's, take a new kernel for each new shape.

    oneDNN, which computes PyTorch's products in bf16 on a CPU with instructions for it, generates code for each shape
    and keeps the last 1024 kernels (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``). Numbers of tokens differ in every rollout and
    in every micro-batch, so most of its kernels would be used once.
    """
    computed = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else dtype
    return device.type == "cpu" and computed == torch.bfloat16 and computes_bf16(device)


def padded_tokens(count: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return a number of tokens in the learner, rounded up where products take a new kernel for each new shape.

    In float32 to a multiple of :data:`TOKENS`: to make oneDNN's kernels takes about as long as that many tokens.
    """
    if kernels_by_shape(device, dtype):
        return bucket(count, TOKENS)
    by_onednn = products.ONEDNN_IS_FASTER and (device.type, dtype) == ("cpu", torch.float32)
    return -(-count // TOKENS) * TOKENS if by_onednn and not torch.is_autocast_enabled("cpu") else count


def bucket(count: int, step: int = 8) -> int:
    """Return the count rounded up to a multiple of the step, or of the eighth of a power of two where that is more.

    >>> [bucket(n) for n in (0, 1, 8, 9, 127, 129, 1000, 1025)]
    [0, 8, 8, 16, 128, 144, 1024, 1152]
    >>> [bucket(n, TOKENS) for n in (1, 65, 1000, 1025)]
    [64, 128, 1024, 1152]
    """
    step = max(step, 1 << max(count.bit_length() - 4, 0))
    return -(-count // step) * step
