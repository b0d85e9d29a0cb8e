"""The devices of a run's learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LearnerPlace:
    """The devices of a run's learner on this machine.

    Args:
        devices: for each of its processes here the index of its GPU, among those that the process sees; empty where it
            computes on CPUs.
        process: number of this process among them.
        processes: how many there are.
    """

    devices: tuple[int, ...] = ()
    process: int = 0
    processes: int = 1

    @classmethod
    def of(cls, device: torch.device) -> LearnerPlace:
        """That of a learner with a single process.

        >>> LearnerPlace.of(torch.device("cuda:1")).devices, LearnerPlace.of(torch.device("cpu")).devices
        ((1,), ())
        """
        return cls((device.index or 0,) if device.type == "cuda" else ())

    def ids(self, visible: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of its GPUs, of those that a process sees."""
        return tuple(visible[index] for index in self.devices)
