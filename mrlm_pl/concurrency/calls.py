"""Calls off the event loop: a bounded queue of threads, fair between clients, and a deadline for every call."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

from mrlm_pl.concurrency.event_loop import shared_fault, shared_loop

T = TypeVar("T")
logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.1
"""Seconds between two checks of the deadlines."""

AWAKE_SECONDS = 1.0
"""Seconds of a wait that pass without a look at the clock: a process that is suspended does not wait."""

CANCEL_SECONDS = 1.0
"""Time for a cancelled coroutine to end."""


class QueueFullError(Exception):
    """More work is waiting than the queue holds."""


class DeadlineError(TimeoutError):
    """A call is late; distinct from a ``TimeoutError`` that the call itself raises."""


@dataclass(frozen=True)
class CallResult:
    """The value or the error of a call, its seconds, and the seconds before it in which it waited for a thread."""

    value: Any
    error: Exception | None
    seconds: float
    queued: float = 0.0

    def value_or_raise(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(eq=False)
class _Job:
    """A call; its future belongs to the event loop that waits for it."""

    client: str
    function: Callable[[], Any]
    timeout: float
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[CallResult]
    put: float
    started: float = 0.0
    queued: float = 0.0

    def settle(self, result: CallResult) -> None:
        """Set the result, on the loop, unless the call was cancelled meanwhile."""
        if not self.result.done():
            self.result.set_result(result)


class Workers:
    """A fixed number of daemon threads. Clients take turns, so that one with much work does not delay the others.

    A thread cannot be killed: one with a late call is abandoned and replaced.

    Args:
        count: number of threads.
        capacity: maximum number of waiting calls.
    """

    def __init__(self, count: int, capacity: float = math.inf) -> None:
        self.count, self.capacity = count, capacity
        self.waiting = 0
        self.abandoned = 0
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._condition = threading.Condition()
        self._running: set[_Job] = set()
        self._watching: dict[asyncio.AbstractEventLoop, float] = {}  # when each was last in `_abandon_late`
        self._threads = self._idle = 0
        self._closed = False

    async def run(self, client: str, function: Callable[[], Any], timeout: float, must: bool = False) -> Any:
        """Return the value of a function, or raise its error or a :class:`DeadlineError`; see :meth:`timed`."""
        return (await self.timed(client, function, timeout, must)).value_or_raise()

    async def timed(self, client: str, function: Callable[[], Any], timeout: float, must: bool = False) -> CallResult:
        """Run a function on a thread, an ``async`` one on the event loop; a late call gives a :class:`DeadlineError`.

        A call that is cancelled while it waits never runs.

        Args:
            client: name of the client, which takes turns with the others.
            function: function without arguments, such as a ``partial`` of a method.
            timeout: deadline in seconds, from the start of the call.
            must: accept the call in a full queue, because it frees resources.

        Raises:
            QueueFullError: the queue is full.
        """
        if inspect.iscoroutinefunction(function):
            return await _await_call(function, timeout)
        loop = asyncio.get_running_loop()
        job = _Job(client, function, timeout, loop, loop.create_future(), time.monotonic())
        self._put(job, must)
        if loop not in self._watching:
            self._watching[loop] = time.monotonic()
            loop.call_later(WATCH_SECONDS, self._abandon_late, loop)
        try:
            return replace(await job.result, queued=job.queued)
        except asyncio.CancelledError:
            self._withdraw(job)
            raise

    def close(self) -> None:
        """Cancel waiting calls, and end the threads when they are idle."""
        with self._condition:
            self._closed = True
            for queue in self._queues.values():
                for job in queue:
                    with suppress(RuntimeError):  # the loop is closed
                        job.loop.call_soon_threadsafe(job.result.cancel)
            self._queues.clear()
            self.waiting = 0
            self._condition.notify_all()

    def _put(self, job: _Job, must: bool) -> None:
        with self._condition:
            if self._closed or (self.waiting >= self.capacity and not must):
                raise QueueFullError(f"{self.waiting} calls are waiting, as many as the queue holds")
            self._queues.setdefault(job.client, deque()).append(job)
            self.waiting += 1
            self._condition.notify()
            self._start_if_needed()

    def _withdraw(self, job: _Job) -> None:
        with self._condition, suppress(KeyError, ValueError):  # a thread has taken it
            queue = self._queues[job.client]
            queue.remove(job)
            self.waiting -= 1
            if not queue:
                del self._queues[job.client]

    def _abandon_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abandon late calls, and check again while there are calls."""
        now = time.monotonic()
        with self._condition:
            # A process that was suspended, or a loop that was blocked: one such wait is not a deadline, many are.
            still = max(0.0, now - self._watching[loop] - AWAKE_SECONDS)
            for job in self._running:
                if job.loop is loop:
                    job.started = min(job.started + still, now)
            self._watching[loop] = now
            late = [
                job
                for job in self._running
                if now - job.started > job.timeout and (job.loop is loop or job.loop.is_closed())
            ]
            for job in late:
                self._running.discard(job)
                self.abandoned += 1
                self._threads -= 1
                self._start_if_needed()
            busy = bool(self._running or self._queues)
        for job in late:
            if job.loop is loop:
                job.settle(_late(job.timeout))
        if busy:
            loop.call_later(WATCH_SECONDS, self._abandon_late, loop)
        else:
            del self._watching[loop]

    def _start_if_needed(self) -> None:
        # A notified thread counts as idle until it runs, so the number of waiting calls decides.
        if self._threads >= self.count or self.waiting <= self._idle:
            return
        self._threads += 1
        threading.Thread(target=self._work, name="environment-worker", daemon=True).start()

    def _take(self) -> _Job | None:
        """Return the next client's next job; None after :meth:`close`."""
        with self._condition:
            while not self._queues:
                if self._closed:
                    return None
                self._idle += 1
                self._condition.wait()
                self._idle -= 1
            client, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind the other clients
            self.waiting -= 1
            job.started = time.monotonic()  # a suspended process moves it
            job.queued = job.started - job.put
            self._running.add(job)
            return job

    def _work(self) -> None:
        while (job := self._take()) is not None:
            result = _time_call(job.function)
            with self._condition:
                if job not in self._running:
                    self.abandoned -= 1
                    return  # it was replaced
                self._running.discard(job)
            with suppress(RuntimeError):  # the loop is closed
                job.loop.call_soon_threadsafe(job.settle, result)


def _late(timeout: float) -> CallResult:
    return CallResult(None, DeadlineError(f"no answer within {timeout:g} s"), timeout)


def _time_call(call: Callable[[], Any]) -> CallResult:
    started = time.perf_counter()
    try:
        return CallResult(call(), None, time.perf_counter() - started)
    except BaseException as raised:  # the caller raises or records it
        return CallResult(None, as_error(raised), time.perf_counter() - started)


async def _time_on_loop(call: Callable[[], Awaitable[Any]]) -> CallResult:
    started = time.perf_counter()
    try:
        return CallResult(await call(), None, time.perf_counter() - started)
    except BaseException as raised:  # as above
        return CallResult(None, as_error(raised), time.perf_counter() - started)


async def _await_call(call: Callable[[], Awaitable[Any]], timeout: float) -> CallResult:
    """Return the result of an ``async`` call, whatever it raises; one that is late or cancelled is cancelled.

    It has a little time to end, and a warning names it if it does not.
    """
    task = asyncio.ensure_future(_time_on_loop(call))
    try:
        # Not wait_for: its TimeoutError looks like one of the environment.
        if await wait_awake([task], timeout):
            return task.result()
    except asyncio.CancelledError:
        await _end(task, call)
        raise
    await _end(task, call)
    return _late(timeout)


async def _end(task: asyncio.Task[CallResult], call: Callable[[], Any]) -> None:
    task.cancel()
    if not (await asyncio.wait([task], timeout=CANCEL_SECONDS))[0]:
        name = getattr(getattr(call, "func", call), "__qualname__", "a function")  # a partial has `func`
        logger.warning("%s was cancelled and has not ended within %g s; it runs on", name, CANCEL_SECONDS)


async def wait_awake(futures: Sequence[asyncio.Future[Any]], seconds: float) -> bool:
    """Wait until one of some futures is done and return True; False after seconds in which the process ran."""
    while seconds > 0:
        step = min(seconds, AWAKE_SECONDS)
        if (await asyncio.wait(futures, timeout=step, return_when=asyncio.FIRST_COMPLETED))[0]:
            return True
        seconds -= step  # and not more, where the process was suspended meanwhile
    return False


async def call_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a user's function: a plain one runs in a daemon thread, an ``async`` one on the shared loop.

    Raises:
        RolloutError: a function blocks the loop.
    """
    call = partial(function, *arguments)
    try:
        value = call() if inspect.iscoroutinefunction(function) else await asyncio.wrap_future(in_daemon(call))
    except asyncio.CancelledError:
        logger.warning("%s was cancelled and runs on in its thread", getattr(function, "__qualname__", function))
        raise
    if inspect.isawaitable(value):
        playing = shared_loop().submit_watched(_await_call(wraps(function)(lambda: value), math.inf))
        value = (await asyncio.wrap_future(playing)).value_or_raise()
    return value


def in_daemon(function: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread, which does not keep the process alive; return the future of its result.

    What would end the thread, such as ``SystemExit``, is a ``RuntimeError``.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as raised:  # the future raises it
            future.set_exception(as_error(raised))

    threading.Thread(target=run, daemon=True).start()
    return future


def as_error(raised: BaseException) -> Exception:
    """Return an exception that ends neither a thread nor the process, unlike ``SystemExit``."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return RuntimeError(f"{type(raised).__name__}: {raised}")


class EnvironmentCaller:
    """Runs batches of calls by :class:`Workers`, and times them.

    Batches may overlap; calls take threads in their order.

    Args:
        workers: number of threads for all batches.
        timeout: deadline of one call in seconds.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.timeout = workers, timeout
        self._workers = Workers(workers)

    async def run(self, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        """Return one result per call, in order, with the error of a failed call."""
        return list(await asyncio.gather(*map(self._result, calls)))

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._workers.close()

    async def _result(self, call: Callable[[], Any]) -> CallResult:
        result = await self._workers.timed("", call, self.timeout)
        if isinstance(result.error, DeadlineError):
            error = f"the environment did not answer within {self.timeout} s; raise `step_timeout` or fix it"
            return CallResult(None, TimeoutError(error + shared_fault()), self.timeout)
        return result


async def together(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of coroutines that run at the same time, in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
