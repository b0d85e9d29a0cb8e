"""The GPUs of a machine for the learner and for workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch

from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.errors import ConfigurationError

_ROUNDING = 1e-6


def visible_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that this process sees, in ``CUDA_VISIBLE_DEVICES``: numbers or UUIDs."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(str(number) for number in range(torch.cuda.device_count()))
    ids = (gpu.strip() for gpu in listed.split(","))
    return tuple(takewhile(lambda gpu: gpu not in ("", "-1", "NoDevFiles"), ids))  # like CUDA, to the first invalid


def room_for_workers(visible: Sequence[str], learner: LearnerPlace, share: bool = False) -> dict[str, float]:
    """Return the fraction of each GPU that the workers of one process may use, in order of assignment.

    The GPUs that the learner does not use are divided evenly among its processes on the machine.

    Args:
        visible: ids of all GPUs.
        learner: devices of the learner.
        share: whether workers may also use the GPU of this process.

    >>> room_for_workers(["0", "1", "2", "3"], LearnerPlace((0,)))
    {'1': 1.0, '2': 1.0, '3': 1.0}
    >>> room_for_workers(["4", "5", "6"], LearnerPlace((0, 1), process=1, processes=2), share=True)
    {'6': 0.5, '5': 1.0}
    """
    used = learner.ids(visible)
    free = [gpu for gpu in visible if gpu not in used]
    first, last = (len(free) * number / learner.processes for number in (learner.process, learner.process + 1))
    shares = {gpu: float(min(place + 1, last) - max(place, first)) for place, gpu in enumerate(free)}
    room = {gpu: portion for gpu, portion in shares.items() if portion > _ROUNDING}
    if share and used:
        room[used[learner.process]] = 1.0
    return room


class GpuLedger:
    """The GPUs of this machine that the workers of this process have."""

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, workers: int, each: float, room: Mapping[str, float]) -> list[tuple[str, ...]]:
        """Return ids of the GPUs of each worker: the first with room.

        Args:
            workers: number of workers.
            each: GPUs of each; below 1, workers share one.
            room: available fraction of each GPU; see :func:`room_for_workers`.

        Raises:
            ConfigurationError: there is not enough room.
        """
        with self._lock:
            room_left = {gpu: portion - self._taken.get(gpu, 0.0) for gpu, portion in room.items()}
            ids: list[tuple[str, ...]] = []
            for _ in range(workers):
                portion, count = min(each, 1.0), max(1, round(each))
                worker_gpus = [gpu for gpu, has in room_left.items() if has > portion - _ROUNDING][:count]
                if len(worker_gpus) < count:
                    raise ConfigurationError(
                        f"{workers} workers want {each:g} GPUs each, but Ray is started by this process, whose workers "
                        f"may have {dict(room)} (fractions by GPU), of which {self._taken} are taken; they do not "
                        "get the learner's. Ask for less (resources.gpus), or let workers share the learner's: "
                        "`resources.share_learner_gpus: true`"
                    )
                for gpu in worker_gpus:
                    room_left[gpu] -= portion
                ids.append(tuple(worker_gpus))
            self._add(ids, min(each, 1.0))
            return ids

    def give_back(self, ids: Sequence[tuple[str, ...]], each: float) -> None:
        """Free the GPUs that :meth:`take` returned."""
        with self._lock:
            self._add(ids, -min(each, 1.0))

    def _add(self, ids: Sequence[tuple[str, ...]], portion: float) -> None:
        for gpu in (gpu for worker_gpus in ids for gpu in worker_gpus):
            self._taken[gpu] = self._taken.get(gpu, 0.0) + portion
            if self._taken[gpu] < _ROUNDING:
                del self._taken[gpu]
