"""An event loop in its own thread, and the computations of the thread that waits for it.

Connections live on between calls. Torch computes in one thread at a time: in the one that waits for results if there is
one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mrlm_pl.concurrency.calls import mark_read
from mrlm_pl.errors import RolloutError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_Item = tuple[Future[Any], Callable[[], Any]]

_SIGNAL_SECONDS = 0.5
"""Longest wait before a thread looks for signals: one that the system gives to another thread does not wake it."""

_LOOK_SECONDS = 1.0
_STALL_SECONDS = 5.0
"""A loop that stands still for this long is a warning: one coroutine blocks all others."""

END_SECONDS = 10.0
"""Longest wait for cancelled coroutines at the end of a run."""


class EventLoopThread:
    """A running event loop; the thread is a daemon.

    Attributes:
        closed: True after :meth:`close`.
    """

    def __init__(self) -> None:
        self._loop, self.closed, self._stall_warned = asyncio.new_event_loop(), False, False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mrlm-event-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            # A coroutine's own KeyboardInterrupt or SystemExit leaves the loop, which still has to pass it on.
            with suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop and return its future; cancelling it cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, play: Callable[[], Coroutine[Any, Any, T]], wait: Callable[[Callable[[], Future[T]]], T]) -> T:
        """Return the result of a coroutine on the loop, which is cancelled if the wait is interrupted.

        Args:
            play: makes the coroutine.
            wait: starts it by a call of its argument, and returns the result of the future.
        """
        started: list[Future[T]] = []

        def start() -> Future[T]:
            started.append(self.submit(play()))
            return started[0]

        try:
            return wait(start)
        finally:
            for running in started:
                running.cancel()  # does nothing to one that is done

    def submit_watched(self, coroutine: Coroutine[Any, Any, T], seconds: float, advice: str) -> Future[T]:
        """Like :meth:`submit`; the future fails with a ``RolloutError`` if the loop stands still for ``seconds``.

        A thread watches the loop, because a blocking call stops all its deadlines.

        Args:
            seconds: longest stall of the loop.
            advice: end of the error's message.
        """
        running, watched = self.submit(coroutine), Future[T]()

        def finish(done: Future[T]) -> None:
            with suppress(InvalidStateError):  # it has failed already
                try:
                    watched.set_result(done.result())
                except BaseException as error:  # the future raises it
                    watched.set_exception(error)

        def watch() -> None:
            while not wait([watched], _LOOK_SECONDS).done:
                turned = threading.Event()
                self._loop.call_soon_threadsafe(turned.set)
                if turned.wait(min(seconds, _STALL_SECONDS)):
                    continue
                if not self._stall_warned and not watched.done():
                    self._stall_warned = True
                    logger.warning(
                        "the event loop has stood still for %g s %s; it stops all episodes: await slow work "
                        "(asyncio.sleep in place of time.sleep)",
                        _STALL_SECONDS,
                        self._place(),
                    )
                if not turned.wait(max(0.0, seconds - _STALL_SECONDS)) and not watched.done():
                    with suppress(InvalidStateError):
                        watched.set_exception(
                            RolloutError(f"the event loop has stood still for {seconds:g} s {self._place()}; {advice}")
                        )
                    return

        running.add_done_callback(finish)
        threading.Thread(target=watch, name="mrlm-event-loop-watch", daemon=True).start()
        return watched

    def _place(self) -> str:
        """Return the place in the code that the loop's thread runs."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "(its thread has ended)"
        return f"in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"

    def cancel_all(self) -> None:
        """Cancel all coroutines and wait for their end; warn of those that continue."""
        ending = self.submit(_cancel_others())
        ended = wait([ending], 2 * END_SECONDS).done
        running = ending.result() if ended else ["the call that blocks the event loop"]
        ending.cancel()  # does nothing to one that is done
        if running:
            logger.warning("cancelled, but not ended within %g s: %s", END_SECONDS, ", ".join(running))

    def close(self) -> None:
        """Cancel all coroutines and end the thread, or abandon a blocked one; may be called twice."""
        if self.closed:
            return
        self.closed = True
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _stop(self) -> None:
        self._stopping = True
        self._loop.stop()


async def _cancel_others() -> list[str]:
    """Cancel all other coroutines and return the names of those that continue."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if not tasks:
        return []
    ended, running = await asyncio.wait(tasks, timeout=END_SECONDS)
    for task in ended:
        mark_read(task)
    return sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in running)


def result_of(future: Future[T]) -> T:
    """Return a future's result; handlers of signals run while the main thread waits for it."""
    while not wait((future,), _SIGNAL_SECONDS).done:
        pass
    return future.result()


def _next(queue: SimpleQueue[_Item | None]) -> _Item | None:
    """Return the next item; handlers of signals run while the main thread waits for it."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=_SIGNAL_SECONDS)


class ComputeQueue:
    """Runs functions one after the other.

    :meth:`submit` passes a function to the thread in :meth:`serve_during`, else to the queue's own thread.

    Args:
        name: name of the queue's own thread.

    Attributes:
        running: the lock that is held while a function runs; a thread that takes it computes between two functions.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.running = threading.Lock()
        self._routing = threading.Lock()
        self._served: SimpleQueue[_Item | None] | None = None
        self._worker: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Submit a function and return its future; functions run in the order of their submission."""
        future: Future[T] = Future()
        item = future, partial(function, *arguments)
        with self._routing:
            if self._served is not None:
                self._served.put(item)
            else:
                self._send_to_worker(item)
        return future

    def serve_during(self, start: Callable[[], Future[T]]) -> T:
        """Run submitted functions in the calling thread until the future of ``start`` is done; return its result.

        The thread serves before ``start`` is called. A second thread in here waits without serving.
        """
        queue: SimpleQueue[_Item | None] = SimpleQueue()
        with self._routing:
            first = self._served is None
            if first:
                self._served = queue
        if not first:
            return result_of(start())
        try:
            waited = start()
            waited.add_done_callback(lambda _: queue.put(None))
            while (item := _next(queue)) is not None:
                self._run_item(item)
        finally:
            with self._routing:
                self._served = None
                while not queue.empty():
                    if (item := queue.get()) is not None:
                        self._send_to_worker(item)
        return waited.result()

    def close(self) -> None:
        """Run all submitted functions, then end the queue's own thread; may be called twice."""
        with self._routing:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _send_to_worker(self, item: _Item) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._worker.submit(self._run_item, item)

    def _run_item(self, item: _Item) -> None:
        future, call = item
        if not future.set_running_or_notify_cancel():
            return
        try:
            with self.running:
                result = call()
        except Exception as error:  # the future raises it
            future.set_exception(error)
        except BaseException as stop:
            # An interrupt continues in this thread; the future of the item fails.
            future.set_exception(RuntimeError(f"the computing thread was stopped by {type(stop).__name__}"))
            raise
        else:
            future.set_result(result)
