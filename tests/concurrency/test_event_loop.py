"""The event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread


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


def test_what_does_not_end_is_told_and_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop.END_SECONDS", 0.2)

    began = threading.Event()

    async def stubborn() -> None:
        began.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    released = threading.Event()

    async def blocking() -> None:
        began.set()
        released.wait(60)

    try:
        for coroutine, name in ((stubborn(), "stubborn"), (blocking(), "blocks the event loop")):
            caplog.clear()
            loop = EventLoopThread()
            began.clear()
            loop.submit(coroutine)
            assert began.wait(60)
            loop.close()
            assert not released.is_set()
            assert name in caplog.text
            assert loop.closed
    finally:
        released.set()


def test_a_loop_that_somebody_blocks_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop._STALL_SECONDS", 0.5)
    monkeypatch.setattr(
        "mrlm_pl.concurrency.event_loop.logger.warning", lambda text, *values: warned.append(text % values)
    )

    async def block() -> int:
        while not warned:
            time.sleep(0.01)  # as an environment does that does not await
        await asyncio.sleep(0.05)
        time.sleep(1.0)
        return 3

    loop = EventLoopThread()
    assert loop.submit_watched(block(), 60.0, "advice").result() == 3
    loop.close()
    [told] = warned
    assert "in block (" in told
    assert "asyncio.sleep in place of time.sleep" in told
