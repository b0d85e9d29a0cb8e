"""Call environments off the event loop, several at a time, each within a deadline."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Call:
    """A method of an environment and its arguments."""

    method: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class CallResult:
    """What a call returned or raised, and the seconds it took."""

    value: Any
    error: Exception | None
    seconds: float

    def value_or_raise(self) -> Any:
        """The returned value; raises what the call raised."""
        if self.error is not None:
            raise self.error
        return self.value


class EnvironmentCaller:
    """Runs batches of calls on worker threads, or on the event loop where the method is ``async``.

    A thread cannot be killed: a call that outlives the deadline is reported as a ``TimeoutError``, its (daemon) thread
    is abandoned and another takes over the calls that were waiting behind it.

    Batches may run at the same time; those that came first get threads first.

    Args:
        workers: threads that work side by side, for all batches together.
        timeout: seconds that one call may take.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.timeout = workers, timeout
        self._free = workers
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, calls: Sequence[Call]) -> list[CallResult]:
        """One result per call, in order; never raises what a call raised."""
        is_async = [inspect.iscoroutinefunction(call.method) for call in calls]
        on_loop = [self._await(call) for call, coroutine in zip(calls, is_async, strict=True) if coroutine]
        on_threads = [call for call, coroutine in zip(calls, is_async, strict=True) if not coroutine]
        awaited, threaded = await asyncio.gather(asyncio.gather(*on_loop), self._run_on_threads(on_threads))
        sources = (iter(threaded), iter(awaited))
        return [next(sources[coroutine]) for coroutine in is_async]

    async def _await(self, call: Call) -> CallResult:
        started = time.perf_counter()
        value: Any = None
        error: Exception | None = None
        task = asyncio.ensure_future(call.method(*call.arguments))
        try:
            # Not wait_for: its TimeoutError cannot be told from one that the environment raises.
            done, _ = await asyncio.wait([task], timeout=self.timeout)
            if done:
                value = task.result()
            else:
                task.cancel()
                await asyncio.wait([task])
                error = self._timeout_error()
        except asyncio.CancelledError:
            task.cancel()
            raise
        except Exception as raised:
            error = raised
        return CallResult(value, error, time.perf_counter() - started)

    async def _run_on_threads(self, calls: Sequence[Call]) -> list[CallResult]:
        if not calls:
            return []
        threads = await self._take_threads(len(calls))
        try:
            wave = _Wave(calls, asyncio.get_running_loop())
            for _ in range(threads):
                wave.start_thread()
            while not wave.finished.is_set():
                try:
                    await asyncio.wait_for(wave.finished.wait(), min(_POLL_SECONDS, self.timeout))
                except asyncio.TimeoutError:
                    wave.expire(self.timeout, self._timeout_error)
            return wave.ordered()
        finally:
            self._give_threads(threads)

    async def _take_threads(self, most: int) -> int:
        """How many threads a batch may start: at least one, which may have to be waited for."""
        if not self._free or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_threads(1)  # it was this batch's turn, and the next one's now
                else:
                    self._waiting.remove(turn)
                raise
            return 1 + self._more_threads(most - 1)
        return self._more_threads(most)

    def _more_threads(self, most: int) -> int:
        taken = min(self._free, most)
        self._free -= taken
        return taken

    def _give_threads(self, count: int) -> None:
        self._free += count
        while self._free and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _timeout_error(self) -> Exception:
        return TimeoutError(f"the environment did not answer within {self.timeout} s; raise `step_timeout` or mend it")


class _Wave:
    """The calls of one batch, shared by its threads."""

    def __init__(self, calls: Sequence[Call], loop: asyncio.AbstractEventLoop) -> None:
        self.calls, self.loop = calls, loop
        self.finished = asyncio.Event()
        self.lock = threading.Lock()
        self.results: dict[int, CallResult] = {}
        self.running: dict[int, float] = {}
        self.next_call = 0

    def start_thread(self) -> None:
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def ordered(self) -> list[CallResult]:
        return [self.results[index] for index in range(len(self.calls))]

    def expire(self, timeout: float, make_error: Callable[[], Exception]) -> None:
        """Report the calls that have run for too long, and replace their threads."""
        now = time.perf_counter()
        with self.lock:
            late = [index for index, started in self.running.items() if now - started > timeout]
            for index in late:
                del self.running[index]
                self.results[index] = CallResult(None, make_error(), timeout)
            complete = len(self.results) == len(self.calls)
            waiting = self.next_call < len(self.calls)
        if complete:
            self.finished.set()
        elif waiting:
            for _ in late:
                self.start_thread()

    def _work(self) -> None:
        while True:
            with self.lock:
                index = self.next_call
                if index == len(self.calls):
                    return
                self.next_call += 1
                started = self.running[index] = time.perf_counter()
            call = self.calls[index]
            value, error = None, None
            try:
                value = call.method(*call.arguments)
            except Exception as raised:
                error = raised
            with self.lock:
                if index not in self.running:
                    return  # given up on: another thread has taken this one's place
                del self.running[index]
                self.results[index] = CallResult(value, error, time.perf_counter() - started)
                complete = len(self.results) == len(self.calls)
            if complete:
                with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    self.loop.call_soon_threadsafe(self.finished.set)
                return
