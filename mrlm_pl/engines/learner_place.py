"""The devices of a run's learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LearnerPlace:
    """The devices of a run's learner on this machine.

    Args:
        devices: index of each process's GPU among the visible ones; empty on CPUs.
        process: number of this process among those of this machine.
        processes: number of processes on this machine.
    """

    devices: tuple[int, ...] = ()
    process: int = 0
    processes: int = 1

    @classmethod
    def of(cls, device: torch.device) -> LearnerPlace:
        """Return the place of a learner with a single process.

        >>> LearnerPlace.of(torch.device("cuda:1")).devices, LearnerPlace.of(torch.device("cpu")).devices
        ((1,), ())
        """
        return cls((device.index or 0,) if device.type == "cuda" else ())

    def ids(self, visible: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of its GPUs among the visible ones."""
        return tuple(visible[index] for index in self.devices)
