"""One computation at a time, in the thread that waits for results if there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


_Item = tuple[Future[Any], Callable[[], Any]]

_LOOK_SECONDS = 0.5
"""Longest wait before a thread looks for signals: one that the system gives to another thread does not wake it."""


def result_of(future: Future[T]) -> T:
    """Return a future's result; handlers of signals run while the main thread waits for it."""
    while not wait((future,), _LOOK_SECONDS).done:
        pass
    return future.result()


def _next(queue: SimpleQueue[_Item | None]) -> _Item | None:
    """Return the next item; handlers of signals run while the main thread waits for it."""
    while True:
        try:
            return queue.get(timeout=_LOOK_SECONDS)
        except Empty:
            continue


class ComputeQueue:
    """Runs functions one after the other.

    :meth:`submit` passes a function to the thread in :meth:`serve_during`, else to the queue's own thread.

    Args:
        name: of the queue's own thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()
        self._routing = threading.Lock()
        self._served: SimpleQueue[_Item | None] | None = None
        self._worker: ThreadPoolExecutor | None = None

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the calling thread, after the current one, and return its value."""
        with self._running:
            return function(*arguments)

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
            result = self.run(call)
        except Exception as error:
            future.set_exception(error)
        except BaseException as stop:
            # An interrupt continues in this thread; the future of the item fails.
            future.set_exception(RuntimeError(f"the computing thread was stopped by {type(stop).__name__}"))
            raise
        else:
            future.set_result(result)
