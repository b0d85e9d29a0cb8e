"""Concurrent calls of environments off the event loop, each within a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mrlm_pl.concurrency.workers import DeadlineError, Workers, as_error

T = TypeVar("T")


async def together(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of coroutines that run at the same time, in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True)
class CallResult:
    """The value or the error of a call, and its seconds."""

    value: Any
    error: Exception | None
    seconds: float

    def value_or_raise(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class EnvironmentCaller:
    """Runs batches of calls on worker threads; ``async`` ones, such as a ``partial`` of a method, on the event loop.

    Batches may overlap; calls take threads in their order.

    Args:
        workers: number of threads for all batches.
        timeout: deadline of one call in seconds.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self.timeout = timeout
        self._workers = Workers(workers)

    async def run(self, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        """Return one result per call, in order, with the error of a failed call."""
        return list(await asyncio.gather(*map(self._result, calls)))

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._workers.close()

    async def _result(self, call: Callable[[], Any]) -> CallResult:
        try:
            if inspect.iscoroutinefunction(call):
                return await self._awaited(call)
            result: CallResult = await self._workers.run("", partial(_called, call), self.timeout)
            return result
        except DeadlineError:
            error = f"the environment did not answer within {self.timeout} s; raise `step_timeout` or fix it"
            return CallResult(None, TimeoutError(error), self.timeout)

    async def _awaited(self, call: Callable[[], Any]) -> CallResult:
        started = time.perf_counter()
        task = asyncio.ensure_future(call())
        try:
            # Not wait_for: its TimeoutError looks like one of the environment.
            done, _ = await asyncio.wait([task], timeout=self.timeout)
            if not done:
                task.cancel()
                await asyncio.wait([task])
                raise DeadlineError
        except asyncio.CancelledError:
            task.cancel()
            raise
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        seconds = time.perf_counter() - started
        if error is not None:
            return CallResult(None, as_error(error), seconds)
        return CallResult(task.result(), None, seconds)


def _called(call: Callable[[], Any]) -> CallResult:
    started = time.perf_counter()
    value: Any = None
    error: Exception | None = None
    try:
        value = call()
    except BaseException as raised:
        error = as_error(raised)
    return CallResult(value, error, time.perf_counter() - started)
