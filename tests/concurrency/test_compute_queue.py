"""The computing thread, and its order, in `mrlm_pl.concurrency.compute_queue`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from mrlm_pl.concurrency.compute_queue import ComputeQueue


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


def test_two_threads_never_compute_at_once(queue: ComputeQueue) -> None:
    running, most = [0], [0]

    def busy() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.002)
        running[0] -= 1

    threads = [threading.Thread(target=queue.run, args=(busy,)) for _ in range(4)]
    futures = [queue.submit(busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result()
    assert most == [1]
    queue.close()
