"""An event loop in its own thread, and the computations of the thread that waits for it.

Connections live on between calls. Torch computes in one thread at a time: in the one that waits for results if there is
one.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mrlm_pl.errors import RolloutError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_Item = tuple[Future[Any], Callable[[], Any]]

_SIGNAL_SECONDS = 0.5
"""Longest wait before a thread looks for signals: one that the system gives to another thread does not wake it."""

_LOOK_SECONDS = 1.0
_THREADS = 1000
"""Maximum number of concurrent ``asyncio.to_thread`` calls in a loop: a wave of programs may all wait for its last."""

_STALL_SECONDS = 5.0
"""A loop that stands still for this long is a warning: one coroutine blocks all others."""

_LATE_SECONDS = 0.05
_LOOKS = 20
"""A loop that is late in most of the last 20 looks, in one line, is a warning too: it stops for short times."""

_LIBRARIES = ("<frozen", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))

ASYNC_ADVICE = (
    "it stops all `async` functions: await slow work, as with an async client or asyncio.to_thread, or write a plain "
    "function (`def`), which has its own thread"
)

END_SECONDS = 10.0
"""Longest wait for cancelled coroutines at the end of a run."""

_CONTINUES = "cancelled, but not ended within %g s: %s"


class EventLoopThread:
    """A running event loop; the thread is a daemon.

    Args:
        patience: seconds for which the loop may stand still before its watched coroutines fail.
        advice: end of the warning and of the error; with it a thread watches the loop, because a blocking call stops
            all its deadlines.

    Attributes:
        closed: True after :meth:`close`.
        stuck: True after it has stood still for longer than its patience.
        fault: place where it stands still, and the advice; empty while it moves.
    """

    def __init__(self, patience: float = math.inf, advice: str = "") -> None:
        self._loop, self.closed, self.stuck = asyncio.new_event_loop(), False, False
        self._loop.set_exception_handler(_log_unread)
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, "mrlm-to-thread"))
        self._patience, self._advice, self.fault, self._ending = patience, advice, "", Future[None]()
        self._watched: dict[Future[Any], Future[Any]] = {}
        self._thread = threading.Thread(target=self._run, name="mrlm-event-loop", daemon=True)
        self._thread.start()
        if advice:
            threading.Thread(target=self._watch, name="mrlm-event-loop-watch", daemon=True).start()

    def _run(self) -> None:
        while not self._ending.done():
            # A coroutine's own KeyboardInterrupt or SystemExit leaves the loop, which still has to pass it on.
            with suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_forever()
        self._loop.close()

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Call a plain function on the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop and return its future; cancelling it cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def submit_watched(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Like :meth:`submit`; the future fails with a ``RolloutError`` if the loop is stuck."""
        running, watched = self.submit(coroutine), Future[T]()

        def finish(done: Future[T]) -> None:
            with suppress(InvalidStateError):  # it has failed or was cancelled
                try:
                    watched.set_result(done.result())
                except BaseException as error:  # the future raises it
                    watched.set_exception(error)

        self._watched[watched] = running
        watched.add_done_callback(lambda done: self._watched.pop(done).cancel())
        running.add_done_callback(finish)
        return watched

    def _watch(self) -> None:
        """Warn of a loop that stands still, and fail the watched coroutines after its patience."""
        warned, stalled, places = False, False, deque[str](maxlen=_LOOKS)
        while not self.closed:
            turned, stood = threading.Event(), 0.0
            with suppress(RuntimeError):  # the loop is closed
                self.call_soon(turned.set)
            places.append("" if turned.wait(_LATE_SECONDS) else self._own_place())
            place, count = Counter(places).most_common(1)[0]
            if place and count > _LOOKS // 2 and not warned:
                warned = True
                logger.warning(f"the event loop stood still in {count} of {len(places)} looks {place}; {self._advice}")
            # Counted, not read from a clock: a process that is suspended does not stand still.
            while not turned.wait(_LOOK_SECONDS) and not self.closed:
                stood += _LOOK_SECONDS
                frame = sys._current_frames().get(self._thread.ident or 0)
                place = _place_of(traceback.extract_stack(frame)) if frame else "(its thread has ended)"
                self.fault = f"the event loop has stood still for {stood:g} s {place}; {self._advice}"
                if stood >= _STALL_SECONDS and not stalled:
                    stalled = True
                    logger.warning(self.fault)
                if stood >= self._patience:
                    self.stuck = True
                    for watched in list(self._watched):
                        with suppress(InvalidStateError):  # it is done
                            watched.set_exception(RolloutError(self.fault))
            self.fault = ""
            time.sleep(_LOOK_SECONDS)

    def _own_place(self) -> str:
        """Return the line of a user's code that the loop is in; empty if it waits for events."""
        stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
        own = [entry for entry in stack if not entry.filename.startswith((*_LIBRARIES, __file__))]
        return f"in {own[-1].name} ({own[-1].filename}:{own[-1].lineno})" if own else ""

    def cancel_all(self) -> Future[None]:
        """Cancel all coroutines and wait for their end; warn of those that continue.

        Returns:
            a future that is done once they have ended; later than the call if one of them blocks the loop.
        """
        ending = self.submit(_cancel_others())
        if not wait([ending], 2 * END_SECONDS).done:
            logger.warning(_CONTINUES, END_SECONDS, "the call that blocks the event loop")
        return ending

    def close(self) -> None:
        """Cancel all coroutines and end the thread; a blocked one ends when it no longer is. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._ending = self.cancel_all()
        self._ending.add_done_callback(lambda _: self.call_soon(self._loop.stop))
        self._thread.join(END_SECONDS)


STUCK_SECONDS = 30.0
"""Longest time for which a user's ``async`` function may block the event loop that all share."""

_shared: EventLoopThread | None = None
_sharing = threading.Lock()


def shared_loop() -> EventLoopThread:
    """Return the event loop of the user's ``async`` functions, which lives until the process ends.

    A client that they share belongs to the loop in which it connects. A loop that is stuck is replaced.
    """
    global _shared
    with _sharing:
        if _shared is None or _shared.stuck:
            if _shared is not None:
                threading.Thread(target=_shared.close, daemon=True).start()  # it may wait for long
            _shared = EventLoopThread(STUCK_SECONDS, ASYNC_ADVICE)
            atexit.register(_leave, _shared)
        return _shared


def shared_fault() -> str:
    """Return ``; `` and the place where the shared event loop stands still, for the error of a call that is late."""
    return f"; {_shared.fault}" if _shared is not None and _shared.fault else ""


def _forget() -> None:
    """Leave the loop to the parent process: a fork has none of its threads."""
    global _shared, _sharing
    _shared, _sharing = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _leave(loop: EventLoopThread) -> None:
    """Close a loop at the end of the process, unless something blocks it."""
    if not loop.closed and wait([loop.submit(asyncio.sleep(0))], _LOOK_SECONDS).done:
        loop.close()


def _log_unread(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log an error that no caller reads, such as one of a task that was left behind, as one line."""
    error = context.get("exception")
    fault = f": {type(error).__name__}: {error} {_place_of(traceback.extract_tb(error.__traceback__))}" if error else ""
    logger.warning("in an event loop: %s%s", context["message"], fault)


def _place_of(stack: traceback.StackSummary) -> str:
    """Return the innermost place of a stack, and the innermost one outside libraries."""
    own = [entry for entry in stack if not entry.filename.startswith(_LIBRARIES)]
    places = [f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in (*stack[-1:], *own[-1:])]
    return "in " + ", called in ".join(dict.fromkeys(places))


async def _cancel_others() -> None:
    """Cancel all other coroutines, and warn of those that continue."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
        task.add_done_callback(mark_read)
    if tasks:
        _, running = await asyncio.wait(tasks, timeout=END_SECONDS)
        if running:
            names = sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in running)
            logger.warning(_CONTINUES, END_SECONDS, ", ".join(names))


def mark_read(done: asyncio.Future[Any]) -> None:
    """Read the error of a future whose caller may be gone; asyncio logs an error that is not read."""
    if not done.cancelled():
        done.exception()


def result_of(future: Future[T]) -> T:
    """Return a future's result, or cancel it if the wait is interrupted: the main thread's handlers of signals run."""
    try:
        while not wait((future,), _SIGNAL_SECONDS).done:
            pass
        return future.result()
    finally:
        future.cancel()  # does nothing to one that is done


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

        The thread serves before ``start`` is called. A second thread in here waits without serving. An interrupt
        cancels the future.
        """
        queue: SimpleQueue[_Item | None] = SimpleQueue()
        with self._routing:
            self._served = self._served or queue
            first = self._served is queue
        if not first:
            return result_of(start())
        waited = Future[T]()
        try:
            waited = start()
            waited.add_done_callback(lambda _: queue.put(None))
            while (item := _next(queue)) is not None:
                self._run_item(item)
        finally:
            waited.cancel()  # does nothing to one that is done
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
