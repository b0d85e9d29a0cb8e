"""Pauses grow, vary, and end before the deadline."""

from __future__ import annotations

import asyncio
import time

from mrlm_pl.concurrency.backoff import Backoff, until


def test_pauses_grow_and_end_with_the_deadline() -> None:
    async def pauses() -> tuple[list[float], float]:
        backoff, begun, found = Backoff(1.0, first=0.1, longest=0.4), time.monotonic(), []
        moment = begun
        while await backoff.pause():
            found.append(time.monotonic() - moment)
            moment = time.monotonic()
        return found, moment - begun

    found, total = asyncio.run(pauses())
    assert 0.05 <= found[0] < 0.2 <= 0.2 + found[2]
    assert found[2] >= 0.2, "it doubles twice"
    assert 1.0 <= total < 3.0


def test_waiting_ends_with_the_condition_or_with_the_time() -> None:
    begun = time.monotonic()
    assert asyncio.run(until(lambda: time.monotonic() > begun + 0.1, 30.0))
    assert not asyncio.run(until(lambda: False, 0.1))
