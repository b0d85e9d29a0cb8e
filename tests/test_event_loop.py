"""The event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mrlm_pl.event_loop import EventLoopThread


def test_coroutines_share_one_loop_in_another_thread() -> None:
    async def where() -> tuple[int, int]:
        return threading.get_ident(), id(asyncio.get_running_loop())

    loop = EventLoopThread()
    first, second = loop.submit(where()).result(), loop.submit(where()).result()
    loop.close()
    assert first == second
    assert first[0] != threading.get_ident()


def test_errors_come_back_and_closing_cancels_what_runs() -> None:
    ended = threading.Event()

    async def fail() -> None:
        raise ValueError("broken")

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop = EventLoopThread()
    with pytest.raises(ValueError, match="broken"):
        loop.submit(fail()).result()
    running = loop.submit(forever())
    loop.submit(asyncio.sleep(0)).result()
    loop.close()
    loop.close()
    assert ended.is_set()
    assert running.cancelled()
