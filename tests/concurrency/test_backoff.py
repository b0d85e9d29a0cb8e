"""Pauses grow, vary, and end before the deadline."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.concurrency.backoff import Backoff, until


def test_pauses_grow_and_end_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = [100.0], list[float]()

    def clock() -> Any:
        return SimpleNamespace(time=lambda: now[0])

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        now[0] += seconds

    async def pauses() -> None:
        backoff = Backoff(1.5, first=0.1, longest=0.4)
        while await backoff.pause():
            pass

    monkeypatch.setattr("mrlm_pl.concurrency.backoff.asyncio", SimpleNamespace(sleep=sleep, get_running_loop=clock))
    asyncio.run(pauses())
    assert all(most / 2 <= pause <= most for most, pause in zip([0.1, 0.2, 0.4, 0.4], found, strict=False))
    assert max(found) <= 0.4
    assert sum(found) == pytest.approx(1.5)


def test_waiting_ends_with_the_condition_or_with_the_time() -> None:
    begun = time.monotonic()
    assert asyncio.run(until(lambda: time.monotonic() > begun + 0.1, 30.0))
    assert not asyncio.run(until(lambda: False, 0.1))
