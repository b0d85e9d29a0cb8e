"""Which task comes next where the shares of the sources change: decided in blocks, and kept until they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.data.task_stream import TaskStream
from mrlm_pl.environment import TaskSource
from mrlm_pl.errors import ConfigurationError


class PlannedStream(TaskStream):
    """A task stream whose positions are planned in blocks (iterations), each with shares of its own.

    What a source should have had so far is the sum over the blocks of its share times the block's length. After every
    block each source's count is within 1 of that: what a block owes or has given too much is carried over. Within a
    block the sources take turns.

    Args: see :class:`TaskStream`.

    >>> from mrlm_pl.environment import DatasetTasks
    >>> stream = PlannedStream({name: DatasetTasks(name, "train", [{}] * 9) for name in "ab"}, None, seed=0)
    >>> stream.plan(4, {"a": 0.75, "b": 0.25})
    >>> stream.plan(4, {"a": 0.25, "b": 0.75})
    >>> "".join(stream[n].environment for n in range(8))
    'aabababb'
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Sequence[float] | None, seed: int) -> None:
        super().__init__(sources, weights, seed)
        self.planned = 0
        self._owed = dict.fromkeys(self.sources, 0.0)

    def plan(self, positions: int, shares: Mapping[str, float]) -> None:
        """Decide the next so many positions; the shares sum to 1."""
        wanted = {name: self._owed[name] + shares[name] * positions for name in self.sources}
        counts = apportioned(wanted, positions)
        self._owed = {name: wanted[name] - counts[name] for name in self.sources}
        turns = sorted(
            ((number + 0.5) / count, place, name)
            for place, (name, count) in enumerate(counts.items())
            for number in range(count)
        )
        for _, _, name in turns:
            self._picks[self.planned] = (name, self._counts[name])
            self._counts[name] += 1
            self.planned += 1

    def picked(self, position: int) -> tuple[str, int]:
        return self._picks[position]

    def state(self) -> dict[str, Any]:
        """What is planned and what is owed, as plain values."""
        return {
            "planned": self.planned,
            "plan": [[position, *pick] for position, pick in sorted(self._picks.items())],
            "owed": dict(self._owed),
            "counts": dict(self._counts),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave.

        Raises:
            ConfigurationError: it is of other sources.
        """
        if set(state["counts"]) != set(self.sources):
            raise ConfigurationError(
                f"the checkpoint's curriculum is over the environments {sorted(state['counts'])}, and this run has "
                f"{sorted(self.sources)}; resume with the same environments and names"
            )
        self.planned = state["planned"]
        self._picks = {position: (name, count) for position, name, count in state["plan"]}
        self._owed, self._counts = dict(state["owed"]), dict(state["counts"])


def apportioned(wanted: Mapping[str, float], seats: int) -> dict[str, int]:
    """Whole numbers next to the wanted ones, none below 0, that sum to ``seats``: largest remainders first.

    Args:
        wanted: numbers that sum to ``seats``.
        seats: how many there are.

    >>> apportioned({"a": 2.5, "b": 1.75, "c": -0.25}, 4)
    {'a': 2, 'b': 2, 'c': 0}
    """
    counts = {name: max(0, math.floor(value)) for name, value in wanted.items()}
    while (missing := seats - sum(counts.values())) != 0:
        behind = {name: wanted[name] - counts[name] for name in counts}
        if missing > 0:
            counts[max(behind, key=lambda name: behind[name])] += 1
        else:
            counts[min((name for name in counts if counts[name]), key=lambda name: behind[name])] -= 1
    return counts
