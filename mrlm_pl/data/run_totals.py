"""How much a run has played so far, over all its parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_COUNTED = ("episodes", "decisions", "generated_tokens")


class RunTotals:
    """Adds up what each iteration played, and goes on from a checkpoint.

    Logged as ``progress/iteration``, ``progress/episodes``, ``progress/decisions``, ``progress/generated_tokens`` and
    ``progress/seconds``: what runs are compared at. Episodes that failed or were replaced count, as they were played.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_COUNTED, 0.0)
        self._seconds = 0.0
        self._since = time.monotonic()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.monotonic()

    def after(self, iteration: int, played: Mapping[str, float]) -> dict[str, float]:
        """Return the totals after an iteration.

        Args:
            iteration: how many are collected.
            played: episodes, decisions and generated tokens of this one.
        """
        for name in _COUNTED:
            self._counts[name] += played[name]
        totals = {"iteration": float(iteration), **self._counts, "seconds": self._elapsed()}
        return {f"progress/{name}": total for name, total in totals.items()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {**self._counts, "seconds": self._elapsed()}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what :meth:`state` returned; None is a checkpoint without totals."""
        found = dict(state or {})
        self._seconds, self._since = float(found.pop("seconds", 0.0)), time.monotonic()
        self._counts = {name: float(found.get(name, 0.0)) for name in _COUNTED}

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._since
