"""Pauses between attempts, and waiting for a condition."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

_POLL_SECONDS = 0.05
_jitter = random.Random()  # for pauses alone, so that callers do not come back at the same moment


class Backoff:
    """Growing pauses between the attempts of one call; made and used on an event loop.

    Args:
        seconds: deadline of the last attempt's start.
        first: the first pause; each is randomly shortened, by up to half.
        longest: the longest pause; shorter ones double.
    """

    def __init__(self, seconds: float = math.inf, first: float = 0.1, longest: float = 2.0) -> None:
        self._loop, self._pause, self._longest = asyncio.get_running_loop(), first, longest
        self._deadline = self._loop.time() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline; below 0 after it."""
        return self._deadline - self._loop.time()

    async def pause(self) -> bool:
        """Sleep before the next attempt, at most until the deadline; after it, return False immediately."""
        if self.left <= 0:
            return False
        await asyncio.sleep(min(self._pause * _jitter.uniform(0.5, 1.0), self.left))
        self._pause = min(2 * self._pause, self._longest)
        return True


async def until(ready: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition holds, for at most some seconds; return whether it does."""
    poll = Backoff(seconds, _POLL_SECONDS, _POLL_SECONDS)
    while not ready():
        if not await poll.pause():
            return False
    return True
