"""Threads that call environments for a server: a bounded queue, fair between clients, and deadlines that hold."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class QueueFullError(Exception):
    """More work is waiting than the queue holds."""


class DeadlineError(TimeoutError):
    """A call outlived its deadline, rather than raised a ``TimeoutError`` of its own."""


class Workers:
    """A fixed number of (daemon) threads. Clients take turns, so one with much work does not hold up the others.

    A thread cannot be killed: one whose call outlives its deadline is given up on, and another takes its place.

    Args:
        count: threads.
        capacity: calls that may wait.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self.count, self.capacity = count, capacity
        self.waiting = 0
        self.abandoned = 0
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._condition = threading.Condition()
        self._threads = self._idle = 0
        self._closed = False

    async def run(self, client: str, function: Callable[[], Any], timeout: float, must: bool = False) -> Any:
        """What the function returns or raises.

        A call that is cancelled before a thread has taken it is not made.

        Args:
            client: whose work it is.
            function: is called on a thread.
            timeout: seconds from the moment that a thread takes it.
            must: it is taken though the queue be full, because it frees what others need.

        Raises:
            QueueFullError: too much work is waiting.
            DeadlineError: it did not return in time.
        """
        loop = asyncio.get_running_loop()
        job = _Job(client, function, loop)
        self._put(job, must)
        try:
            await asyncio.shield(job.begun)
            done, _ = await asyncio.wait([job.result], timeout=timeout)
        except asyncio.CancelledError:
            if not self._withdraw(job):
                loop.call_later(timeout, self._give_up, job)  # else one that hangs would keep its thread for ever
            raise
        if not done:
            self._give_up(job)
            raise DeadlineError(f"no answer within {timeout:g} s")
        return job.result.result()

    def close(self) -> None:
        """End the threads when they are idle; calls that wait are cancelled."""
        with self._condition:
            self._closed = True
            for queue in self._queues.values():
                for job in queue:
                    job.tell(job.begun.cancel)
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

    def _withdraw(self, job: _Job) -> bool:
        """Take a call back; False if a thread has taken it."""
        with self._condition:
            queue = self._queues.get(job.client, ())
            if job not in queue:
                return False
            queue.remove(job)  # type: ignore[union-attr] # it is in it, so it is a deque
            self.waiting -= 1
            if not queue:
                del self._queues[job.client]
            return True

    def _give_up(self, job: _Job) -> None:
        with self._condition:
            if not job.finished:
                job.abandoned = True
                self.abandoned += 1
                self._threads -= 1
                self._start_if_needed()

    def _start_if_needed(self) -> None:
        # A thread that was notified counts as idle until it runs, so the calls that wait are what tells.
        if self._threads >= self.count or self.waiting <= self._idle:
            return
        self._threads += 1
        threading.Thread(target=self._work, name="environment-worker", daemon=True).start()

    def _take(self) -> _Job | None:
        """The next client's next job; None when the threads are to end."""
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
            return job

    def _work(self) -> None:
        while (job := self._take()) is not None:
            job.run()
            with self._condition:
                job.finished = True
                if job.abandoned:
                    self.abandoned -= 1
                    return  # another thread has taken this one's place


class _Job:
    """A call, and how far it is. Its futures are those of the event loop that waits for it."""

    def __init__(self, client: str, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.function, self.loop = client, function, loop
        self.begun: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[Any] = loop.create_future()
        self.finished = self.abandoned = False

    def run(self) -> None:
        self.tell(_set, self.begun, None, None)
        value: Any = None
        error: Exception | None = None
        try:
            value = self.function()
        except BaseException as raised:  # SystemExit must end neither the thread nor the server
            passes = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if passes else RuntimeError(f"{type(raised).__name__}: {raised}")  # type: ignore[assignment]
        self.tell(_set, self.result, value, error)

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop."""
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(function, *arguments)


def _set(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return  # cancelled meanwhile
    if error is not None:
        future.set_exception(error)
        future.exception()  # it may be that nobody waits for it: then it is not to be reported as lost
    else:
        future.set_result(value)
