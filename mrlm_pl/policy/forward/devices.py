"""Transfers between the host and a device that wait for none of the device's work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Tensor | Sequence[int], device: torch.device | str) -> Tensor:
    """Return the host's numbers on a device; the host does not wait for the work that the device has still to do.

    CUDA copies from pageable memory only when all earlier work is done, from pinned memory in order with it.

    >>> on_device([3, 5], torch.device("cpu"))
    tensor([3, 5])
    """
    host = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
