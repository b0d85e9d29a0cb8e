from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.concurrency import calls as calls_module
from mrlm_pl.concurrency.calls import DeadlineError, QueueFullError, Workers, in_daemon


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 100))


class Gate:
    """A call that waits until it is let go, and tells that it has begun."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.open.wait(100)
        return "through"

    async def entered(self) -> None:
        await asyncio.to_thread(self.begun.wait, 100)
        assert self.begun.is_set()


def test_a_call_gives_what_it_returns_or_raises() -> None:
    async def test() -> None:
        workers = Workers(2, 10)
        assert await workers.run("a", lambda: 7, 60) == 7
        with pytest.raises(OSError, match="away"):
            await workers.run("a", raising(OSError("away")), 60)
        workers.close()

    run(test)


def raising(error: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1), asyncio.CancelledError()])
def test_what_would_end_a_thread_or_a_loop_is_told_as_an_error(error: BaseException) -> None:
    async def test() -> None:
        workers = Workers(1, 10)
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await workers.run("a", raising(error), 60)
        assert await workers.run("a", lambda: 7, 60) == 7, "the thread lives"
        workers.close()

    run(test)


def test_clients_take_turns() -> None:
    async def test() -> None:
        workers, gate, order = Workers(1, 100), Gate(), list[str]()
        first = asyncio.ensure_future(workers.run("busy", gate, 60))
        await gate.entered()
        calls = [
            asyncio.ensure_future(workers.run(name, lambda name=name: order.append(name), 60))
            for name in ["busy"] * 6 + ["light"] * 2 + ["other"]
        ]
        await asyncio.sleep(0)
        assert workers.waiting == 9
        gate.open.set()
        await asyncio.gather(first, *calls)
        assert order == ["busy", "light", "other", "busy", "light", "busy", "busy", "busy", "busy"]
        workers.close()

    run(test)


def test_the_queue_is_bounded_but_for_calls_that_free_something() -> None:
    async def test() -> None:
        workers, gate = Workers(1, 2), Gate()
        first = asyncio.ensure_future(workers.run("a", gate, 60))
        await gate.entered()
        waiting = [asyncio.ensure_future(workers.run("a", lambda: 1, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 calls are waiting"):
            await workers.run("b", lambda: 1, 60)
        freeing = asyncio.ensure_future(workers.run("b", lambda: "freed", 60, must=True))
        await asyncio.sleep(0)
        gate.open.set()
        assert await asyncio.gather(first, *waiting, freeing) == ["through", 1, 1, "freed"]
        assert workers.waiting == 0
        workers.close()

    run(test)


def test_a_burst_uses_all_threads_although_one_is_idle() -> None:
    async def test() -> None:
        workers, gates = Workers(3, 10), [Gate(), Gate(), Gate()]
        await workers.run("a", lambda: 0, 60)
        await asyncio.sleep(0.05)  # its thread is idle now
        calls = [asyncio.ensure_future(workers.run("a", gate, 60)) for gate in gates]
        for gate in gates:
            await gate.entered()  # all at the same time: none waits for another
        assert workers.waiting == 0, "each has a thread"
        assert not any(call.done() for call in calls), "and all are in their calls"
        for gate in gates:
            gate.open.set()
        assert await asyncio.gather(*calls) == ["through"] * 3
        workers.close()

    run(test)


def test_a_call_is_not_late_because_the_process_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(ahead=0.0, monotonic=lambda: time.monotonic() + clock.ahead, perf_counter=time.perf_counter)
    monkeypatch.setattr(calls_module, "time", clock)

    async def awaiting() -> str:
        await asyncio.sleep(30_000.5)
        return "through"

    async def test() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
        workers, gate = Workers(1), Gate()
        calls = [asyncio.ensure_future(workers.timed("a", call, 60)) for call in (gate, awaiting)]
        await gate.entered()
        for _ in range(3):
            clock.ahead += 10_000.0
            await asyncio.sleep(0.2)
        gate.open.set()
        results = await asyncio.gather(*calls)
        assert [result.value for result in results] == ["through"] * 2
        assert max(result.queued for result in results) < 60, "they were not waiting for a thread"
        workers.close()

    asyncio.run(test())


def test_a_loop_that_is_blocked_again_and_again_still_has_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(ahead=0.0, monotonic=lambda: time.monotonic() + clock.ahead, perf_counter=time.perf_counter)
    monkeypatch.setattr(calls_module, "time", clock)

    async def test() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
        workers, gate = Workers(1), Gate()
        call = asyncio.ensure_future(workers.run("a", gate, 3))
        await gate.entered()
        for _ in range(5):
            clock.ahead += 10.0
            await asyncio.sleep(0.01)
        gate.open.set()
        with pytest.raises(DeadlineError):
            await call
        workers.close()

    asyncio.run(test())


def test_waits_of_a_loop_move_the_deadlines_of_its_running_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=time.monotonic(), monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(calls_module, "time", clock)

    async def passing(seconds: float, times: int) -> None:
        for _ in range(times):
            clock.now += seconds
            for _ in range(5):  # the check of the deadlines, and the end of a late call
                await asyncio.sleep(0)

    async def test() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
        workers, first, second, third = Workers(1), Gate(), Gate(), Gate()
        calls = [asyncio.ensure_future(workers.run("a", gate, 3)) for gate in (first, second, third)]
        await first.entered()
        await passing(0.5, 5)
        assert not calls[0].done(), "it is not late after 2.5 seconds"
        clock.now += 10.0
        first.open.set()
        second.begun.wait(100)  # it begins at the end of the wait, which does not count for it
        await passing(0.9, 5)
        assert isinstance(calls[1].done() and calls[1].exception(), DeadlineError)
        await third.entered()
        await passing(0.9, 2)
        other = asyncio.new_event_loop()
        workers._watching[other] = clock.monotonic() - 100
        workers._abandon_late(other)
        other.close()
        await passing(0.9, 2)
        assert isinstance(calls[2].done() and calls[2].exception(), DeadlineError)
        second.open.set()
        third.open.set()
        workers.close()

    asyncio.run(asyncio.wait_for(test(), 1000))


def test_a_hung_call_costs_its_deadline_and_no_thread() -> None:
    async def test() -> None:
        workers, gates = Workers(2, 10), [Gate(), Gate()]
        calls = [asyncio.ensure_future(workers.run("a", gate, 0.2)) for gate in gates]
        behind = asyncio.ensure_future(workers.run("b", lambda: "served", 60))
        for call in calls:
            with pytest.raises(DeadlineError, match=r"0\.2 s"):
                await call
        assert await behind == "served"
        assert workers.abandoned == 2
        assert await asyncio.gather(*(workers.run("b", lambda: 1, 60) for _ in range(4))) == [1] * 4
        for gate in gates:
            gate.open.set()
        while workers.abandoned:
            await asyncio.sleep(0.01)
        assert await workers.run("b", lambda: 1, 60) == 1
        workers.close()

    run(test)


def test_a_deadline_begins_when_a_thread_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter, now=0.0)
    monkeypatch.setattr("mrlm_pl.concurrency.calls.time", clock)
    monkeypatch.setattr("mrlm_pl.concurrency.calls.WATCH_SECONDS", 0.01)

    async def test() -> None:
        workers, first_gate, second_gate = Workers(1, 10), Gate(), Gate()
        first = asyncio.ensure_future(workers.run("a", first_gate, math.inf))
        await first_gate.entered()
        second = asyncio.ensure_future(workers.run("b", second_gate, 60))
        await asyncio.sleep(0)
        clock.now += 100
        first_gate.open.set()
        assert await first == "through"
        await second_gate.entered()
        clock.now += 50
        await asyncio.sleep(0.1)  # several looks of the watch
        second_gate.open.set()
        assert await second == "through"
        workers.close()

    run(test)


def test_a_call_that_is_cancelled_while_it_waits_is_never_made() -> None:
    async def test() -> None:
        workers, gate, made = Workers(1, 2), Gate(), list[str]()
        first = asyncio.ensure_future(workers.run("a", gate, 60))
        await gate.entered()
        cancelled = asyncio.ensure_future(workers.run("a", lambda: made.append("cancelled"), 60))
        kept = asyncio.ensure_future(workers.run("a", lambda: made.append("kept"), 60))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert workers.waiting == 1, "its place is free"
        gate.open.set()
        await asyncio.gather(first, kept)
        assert made == ["kept"]
        workers.close()

    run(test)


def test_a_cancelled_call_that_hangs_does_not_keep_its_thread() -> None:
    async def test() -> None:
        workers, gate = Workers(1, 10), Gate()
        call = asyncio.ensure_future(workers.run("a", gate, 60))
        await gate.entered()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        (job,) = workers._running
        job.timeout = 0.0  # only now, so that it is late after it was cancelled
        assert await workers.run("b", lambda: "served", 60) == "served"
        assert workers.abandoned == 1
        gate.open.set()
        workers.close()

    run(test)


def test_closing_cancels_what_waits() -> None:
    async def test() -> None:
        workers, gate = Workers(1, 10), Gate()
        first = asyncio.ensure_future(workers.run("a", gate, 60))
        await gate.entered()
        waiting = asyncio.ensure_future(workers.run("a", lambda: 1, 60))
        await asyncio.sleep(0)
        workers.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(QueueFullError):
            await workers.run("a", lambda: 1, 60)
        gate.open.set()
        assert await first == "through"

    run(test)


def test_a_daemon_thread_gives_what_its_function_returns_or_raises() -> None:
    assert in_daemon(lambda: 7).result(10) == 7
    with pytest.raises(OSError, match="away"):
        in_daemon(raising(OSError("away"))).result(10)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_daemon_thread_that_would_end_resolves_its_future(error: BaseException) -> None:
    with pytest.raises(RuntimeError, match=type(error).__name__):
        in_daemon(raising(error)).result(10)
