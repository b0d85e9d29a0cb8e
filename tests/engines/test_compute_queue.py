"""Who computes, and when, in `mrlm_pl.engines.compute_queue`."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from mrlm_pl.engines.compute_queue import ComputeQueue


@pytest.fixture
def queue() -> ComputeQueue:
    return ComputeQueue("compute-test")


def finish_after(queue: ComputeQueue, work: list[object]) -> tuple[Future[str], threading.Thread]:
    """A future that another thread fulfils once the functions that it submits have run."""
    waited: Future[str] = Future()

    def feed() -> None:
        for function in work:
            queue.submit(function).exception()  # type: ignore[arg-type]
        waited.set_result("done")

    return waited, threading.Thread(target=feed)


def test_without_a_waiting_thread_the_queue_computes_in_its_own(queue: ComputeQueue) -> None:
    assert queue.submit(lambda: threading.current_thread().name).result().startswith("compute-test")
    queue.close()


def test_the_waiting_thread_computes_in_the_order_of_submission(queue: ComputeQueue) -> None:
    ran: list[tuple[int, int]] = []
    work: list[object] = [lambda n=n: ran.append((n, threading.get_ident())) for n in range(5)]
    waited, feeder = finish_after(queue, work)
    feeder.start()
    assert queue.serve_until(waited) == "done"
    # Functions that were submitted before serve_until began went to the queue's own thread.
    assert [n for n, _ in ran] == list(range(5))
    assert ran[-1][1] == threading.get_ident() or len({thread for _, thread in ran}) <= 2
    queue.close()


def test_everything_submitted_while_a_thread_waits_runs_there(queue: ComputeQueue) -> None:
    threads: list[int] = []
    serving, waited = threading.Event(), Future[None]()

    def feed() -> None:
        serving.wait()
        for _ in range(3):
            queue.submit(lambda: threads.append(threading.get_ident())).result()
        waited.set_result(None)

    def first() -> None:
        serving.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    starter = threading.Timer(0.05, lambda: queue.submit(first))
    starter.start()
    queue.serve_until(waited)
    feeder.join()
    assert threads == [threading.get_ident()] * 3
    queue.close()


def test_an_error_belongs_to_the_item_and_not_to_the_waiting_thread(queue: ComputeQueue) -> None:
    def fail() -> None:
        raise ValueError("broken")

    ran: list[str] = []
    waited, feeder = finish_after(queue, [fail, lambda: ran.append("after")])
    feeder.start()
    assert queue.serve_until(waited) == "done"
    assert ran == ["after"]
    queue.close()


def test_an_interrupt_stops_the_waiting_thread_and_fails_the_item(queue: ComputeQueue) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    waited: Future[None] = Future()
    items: list[Future[None]] = []
    starter = threading.Timer(0.05, lambda: items.append(queue.submit(interrupt)))
    starter.start()
    with pytest.raises(KeyboardInterrupt):
        queue.serve_until(waited)
    assert isinstance(items[0].exception(timeout=5), RuntimeError)
    assert queue.submit(lambda: 3).result() == 3, "the queue goes on in its own thread"
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


def test_a_short_function_does_not_wait_for_the_one_that_runs(queue: ComputeQueue) -> None:
    started, release, order = threading.Event(), threading.Event(), list[str]()

    def long() -> None:
        started.set()
        release.wait(5)
        order.append("long")

    future = queue.submit(long)
    started.wait(5)
    queue.run_soon(order.append, "short")
    assert order == []
    release.set()
    future.result()
    queue.run(lambda: None)
    assert order == ["long", "short"]
    queue.close()
