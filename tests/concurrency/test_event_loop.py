"""The event loop in its own thread, and the computing thread and its order."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from mrlm_pl.concurrency import event_loop
from mrlm_pl.concurrency.event_loop import ComputeQueue, EventLoopThread


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


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("inner", [False, True], ids=["coroutine", "task"])
@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_a_coroutine_that_raises_an_interrupt_raises_it_in_the_caller_and_the_loop_lives(
    stop: type[BaseException], inner: bool, watched: bool
) -> None:
    async def fail() -> None:
        raise stop

    async def outer() -> None:
        await asyncio.gather(fail(), asyncio.sleep(0))

    loop = EventLoopThread(60, "advice")
    play = outer() if inner else fail()
    running = loop.submit_watched(play) if watched else loop.submit(play)
    with pytest.raises(stop):
        running.result(10)
    assert loop.submit(asyncio.sleep(0, "alive")).result(10) == "alive"
    loop.close()


def test_what_does_not_end_is_told_and_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    began = threading.Event()

    async def stubborn() -> None:
        began.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    released, wait = threading.Event(), asyncio.wait

    async def blocking() -> None:
        began.set()
        released.wait(60)

    # The loop gives the coroutines up long before the closing thread gives up the loop, even on a busy machine.
    monkeypatch.setattr(asyncio, "wait", lambda tasks, timeout: wait(tasks, timeout=timeout / 100))
    try:
        for coroutine, name, seconds in ((stubborn(), "stubborn", 10.0), (blocking(), "blocks the event loop", 0.2)):
            monkeypatch.setattr("mrlm_pl.concurrency.event_loop.END_SECONDS", seconds)
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


def test_what_waits_behind_a_blocking_call_ends_also_after_the_loop_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(event_loop, "END_SECONDS", 0.2)
    began, released = threading.Event(), threading.Event()

    async def blocking() -> None:
        began.set()
        released.wait(60)

    loop = EventLoopThread()
    loop.submit(blocking())
    assert began.wait(60)
    waiting = loop.submit(asyncio.Event().wait())
    loop.close()
    assert not waiting.done()
    released.set()
    with pytest.raises(CancelledError):
        waiting.result(10)
    loop._thread.join(10)
    assert not loop._thread.is_alive()
    del loop, waiting
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


def test_a_loop_that_somebody_blocks_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop._STALL_SECONDS", 0.5)
    monkeypatch.setattr("mrlm_pl.concurrency.event_loop.logger.warning", warned.append)

    async def block() -> int:
        while not warned:
            time.sleep(0.01)  # as an environment does that does not await
        await asyncio.sleep(0.05)
        time.sleep(1.0)
        return 3

    loop = EventLoopThread(60.0, "advice")
    loop.submit(asyncio.sleep(0)).result()  # its thread runs
    assert loop.submit_watched(block()).result() == 3
    loop.close()
    [told] = warned
    assert "in block (" in told
    assert told.endswith("; advice")


@pytest.mark.parametrize("blocks", [True, False])
def test_a_loop_that_stops_often_for_a_short_time_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(event_loop, "_LATE_SECONDS", 0.002 if blocks else 0.0)  # as on a busy machine
    monkeypatch.setattr(event_loop.logger, "warning", warned.append)
    end = time.monotonic() + (20 if blocks else 0.6)

    async def step() -> None:
        while time.monotonic() < end and not warned:
            if blocks:
                time.sleep(0.02)
            await asyncio.sleep(0.001)

    loop = EventLoopThread(60.0, "advice")
    loop.submit(step()).result()
    loop.close()
    assert len(warned) == blocks
    assert all(re.search(r"in 1\d of \d+ looks in step \(.*\); advice$", text) for text in warned), warned


def test_a_loop_that_stopped_for_short_times_is_told_of_when_it_stops_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    for name, seconds in (("_LOOK_SECONDS", 0.01), ("_LATE_SECONDS", 0.002), ("_STALL_SECONDS", 0.3)):
        monkeypatch.setattr(event_loop, name, seconds)
    monkeypatch.setattr(event_loop.logger, "warning", warned.append)
    end = time.monotonic() + 20

    async def step() -> None:
        while time.monotonic() < end and not warned:
            time.sleep(0.02)
            await asyncio.sleep(0.001)
        while time.monotonic() < end and len(warned) < 2:
            time.sleep(0.01)

    loop = EventLoopThread(60.0, "advice")
    loop.submit(step()).result()
    loop.close()
    assert ["looks in step" in text for text in warned] == [True, False]


def test_threads_suffice_for_calls_that_wait_for_the_last_of_them() -> None:
    meeting = threading.Barrier(60)

    async def meet() -> int:
        return await asyncio.to_thread(meeting.wait, 10)

    loop = EventLoopThread()
    met = [loop.submit(meet()) for _ in range(60)]
    assert {future.result(20) for future in met} == {*range(60)}
    loop.close()


def test_a_blocked_loop_is_stuck_though_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 0.01)
    blocked = threading.Event()

    async def block() -> None:
        blocked.wait(10)

    loop = EventLoopThread(patience=0.05, advice="await")
    loop.submit(block())
    deadline = time.monotonic() + 10
    while not loop.stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    blocked.set()
    assert loop.stuck
    loop.close()


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    code = """
import asyncio, os
from mrlm_pl.concurrency.event_loop import shared_loop

async def answer():
    return 7

assert shared_loop().submit(answer()).result(10) == 7
child = os.fork()
if not child:
    os._exit(shared_loop().submit(answer()).result(10))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "7\n"


def test_an_error_that_is_not_read_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def leave() -> None:
        asyncio.ensure_future(fail())  # noqa: RUF006 (left behind)
        await asyncio.sleep(0)
        gc.collect()

    loop = EventLoopThread()
    loop.submit(leave()).result()
    loop.close()
    (record,) = [record for record in caplog.records if "broken" in record.getMessage()]
    assert "Task exception was never retrieved: ValueError: broken in fail (" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert record.exc_info is None


@pytest.fixture
def queue() -> ComputeQueue:
    return ComputeQueue("compute-test")


def feed(queue: ComputeQueue, work: list[Callable[[], object]]) -> Future[str]:
    """Return a future that another thread fulfils once the functions that it submits have run."""
    waited: Future[str] = Future()

    def submit() -> None:
        for function in work:
            queue.submit(function).exception()
        waited.set_result("done")

    threading.Thread(target=submit).start()
    return waited


def test_without_a_waiting_thread_the_queue_computes_in_its_own(queue: ComputeQueue) -> None:
    assert queue.submit(lambda: threading.current_thread().name).result().startswith("compute-test")
    queue.close()


def test_the_waiting_thread_computes_all_in_the_order_of_submission(queue: ComputeQueue) -> None:
    ran: list[tuple[int, int]] = []
    work: list[Callable[[], object]] = [lambda n=n: ran.append((n, threading.get_ident())) for n in range(5)]  # type: ignore[misc]
    assert queue.serve_during(lambda: feed(queue, work)) == "done"
    assert ran == [(n, threading.get_ident()) for n in range(5)]
    queue.close()


def test_what_is_submitted_while_work_starts_is_computed_by_the_waiting_thread_too(queue: ComputeQueue) -> None:
    # The very first request comes before the caller begins to wait.
    assert queue.serve_during(lambda: queue.submit(threading.get_ident)) == threading.get_ident()
    queue.close()


def test_an_error_belongs_to_the_item_and_not_to_the_waiting_thread(queue: ComputeQueue) -> None:
    def fail() -> None:
        raise ValueError("broken")

    ran: list[str] = []
    assert queue.serve_during(lambda: feed(queue, [fail, lambda: ran.append("after")])) == "done"
    assert ran == ["after"]
    with pytest.raises(ValueError, match="broken"):
        queue.serve_during(lambda: queue.submit(fail))
    queue.close()


def test_an_interrupt_stops_the_waiting_thread_and_fails_the_item(queue: ComputeQueue) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    items: list[Future[None]] = []

    def start() -> Future[None]:
        items.append(queue.submit(interrupt))
        return items[0]

    with pytest.raises(KeyboardInterrupt):
        queue.serve_during(start)
    assert isinstance(items[0].exception(timeout=60), RuntimeError)
    assert queue.submit(lambda: 3).result() == 3, "the queue continues in its own thread"
    queue.close()


def test_an_interrupt_cancels_the_coroutine_that_the_thread_waits_for(queue: ComputeQueue) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    loop, waited = EventLoopThread(), list[Future[None]]()

    def start() -> Future[None]:
        waited.append(loop.submit(asyncio.sleep(3600)))
        queue.submit(interrupt)
        return waited[0]

    with pytest.raises(KeyboardInterrupt):
        queue.serve_during(start)
    assert waited[0].cancelled()
    loop.close()
    queue.close()


def test_two_threads_never_compute_at_once(queue: ComputeQueue) -> None:
    running, most = [0], [0]

    def busy() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.002)
        running[0] -= 1

    def direct() -> None:
        with queue.running:
            busy()

    threads = [threading.Thread(target=direct) for _ in range(4)]
    futures = [queue.submit(busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result()
    assert most == [1]
    queue.close()
