"""What runs in a worker process of a reference pool: frozen models, and forward passes through them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.ray_worker import FilledWorker
from mrlm_pl.policy.forward_passes import ForwardPass, pass_logprobs


@dataclass(frozen=True)
class Precision:
    """In which precision the learner computes.

    Args:
        autocast: what it casts to, or None.
        default: torch's default dtype.
    """

    autocast: torch.dtype | None
    default: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Precision:
        """That of this thread on a device."""
        casts = torch.is_autocast_enabled(device.type)
        return cls(torch.get_autocast_dtype(device.type) if casts else None, torch.get_default_dtype())

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Within the context this thread computes likewise on a device; the default is that of the whole process."""
        before = torch.get_default_dtype()
        casting: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            casting = torch.autocast(device.type, self.autocast)
        torch.set_default_dtype(self.default)
        try:
            with casting:
                yield
        finally:
            torch.set_default_dtype(before)


class ReferenceWorker(FilledWorker):
    """Frozen models in a worker process; it makes one forward pass at a time."""

    def __init__(self, gpus: str | None, name: str) -> None:
        super().__init__(gpus, name, calls=1)

    def use(self, policy: str, model: Any, version: int) -> None:
        """Nothing: the models are used as they are."""

    async def logprobs(self, model: str, planned: ForwardPass, precision: Precision) -> Tensor:
        """Log-probability [n] of each action token of a pass, on the CPU."""
        async with self.call():
            return await asyncio.to_thread(self._logprobs, self._models[model][0], planned, precision)

    @torch.no_grad()
    def _logprobs(self, model: Any, planned: ForwardPass, precision: Precision) -> Tensor:
        with precision.on(self._device):
            return pass_logprobs(model, planned.to(self._device)).cpu()
