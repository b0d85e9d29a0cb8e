from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mrlm_pl.concurrency.calls import EnvironmentCaller


def run(caller: EnvironmentCaller, *calls: Callable[[], Any]):
    return asyncio.run(caller.run(calls))


def test_results_keep_the_order_of_the_calls_whatever_their_kind() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0.01)
        return value

    def now(value: int) -> int:
        return value

    methods = [later, now, now, later, now]
    results = run(EnvironmentCaller(2, 5.0), *(partial(method, n) for n, method in enumerate(methods)))
    assert [result.value for result in results] == [0, 1, 2, 3, 4]


def test_a_failure_is_the_result_of_its_own_call_only() -> None:
    def fail() -> None:
        raise OSError("gone")

    bad, good = run(EnvironmentCaller(1, 5.0), fail, lambda: 7)
    assert isinstance(bad.error, OSError)
    assert good.value_or_raise() == 7


def test_a_stuck_call_is_given_up_and_those_behind_it_still_run() -> None:
    release = threading.Event()
    results = run(EnvironmentCaller(1, 1.0), partial(release.wait, 100), *(lambda: 1 for _ in range(3)))
    release.set()
    assert isinstance(results[0].error, TimeoutError)
    assert [result.value for result in results[1:]] == [1, 1, 1]


def test_an_async_call_has_the_same_deadline() -> None:
    (result,) = run(EnvironmentCaller(1, 0.05), partial(asyncio.sleep, 20))
    assert isinstance(result.error, TimeoutError)


def test_a_timeout_error_of_the_environment_is_told_as_it_is() -> None:
    async def raises() -> None:
        raise TimeoutError("a tool of mine was late")

    (result,) = run(EnvironmentCaller(1, 5.0), raises)
    assert str(result.error) == "a tool of mine was late"


def test_batches_that_overlap_share_the_threads() -> None:
    caller = EnvironmentCaller(workers=3, timeout=100.0)
    lock, all_busy, counts = threading.Lock(), threading.Event(), {"now": 0, "most": 0}

    def busy(number: int) -> int:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
            if counts["now"] == 3:
                all_busy.set()
        all_busy.wait(60)
        time.sleep(0.01)
        with lock:
            counts["now"] -= 1
        return number

    async def play() -> list[list[int]]:
        batches = [[partial(busy, 10 * batch + n) for n in range(5)] for batch in range(4)]
        found = await asyncio.gather(*(caller.run(calls) for calls in batches))
        return [[result.value_or_raise() for result in results] for results in found]

    assert asyncio.run(play()) == [[10 * batch + n for n in range(5)] for batch in range(4)]
    assert counts["most"] == 3


def test_a_batch_that_is_cancelled_while_it_waits_leaves_its_turn_to_the_next() -> None:
    caller = EnvironmentCaller(workers=1, timeout=100.0)
    hold = threading.Event()

    async def play() -> list[int]:
        first = asyncio.ensure_future(caller.run([partial(hold.wait, 60.0)]))
        await asyncio.sleep(0)
        gone = asyncio.ensure_future(caller.run([partial(int, 1)]))
        kept = asyncio.ensure_future(caller.run([partial(int, 2)]))
        await asyncio.sleep(0)
        gone.cancel()
        hold.set()
        await first
        return [result.value_or_raise() for result in await kept]

    assert asyncio.run(play()) == [2]
