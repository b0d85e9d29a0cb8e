"""Continuous batching in rounds: environments step while other episodes are sampled, in a fixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mrlm_pl.concurrency.calls import CallResult, EnvironmentCaller
from mrlm_pl.concurrency.event_loop import mark_read
from mrlm_pl.engines.base import Engine, EngineWrapper, Sample, SampleRequest
from mrlm_pl.engines.local.continuous import ContinuousEngine
from mrlm_pl.settings import PositiveInt, Settings

T = TypeVar("T")


@dataclass(frozen=True)
class RoundOptions(Settings):
    """Settings of :class:`Rounds`.

    Args:
        chunk_tokens: maximum number of tokens of a turn in a round.
        answer: number of rounds that an answer of an environment takes; a slower one delays the end of its round.

    Raises:
        ConfigurationError: a value is below 1.
    """

    chunk_tokens: PositiveInt = 32
    answer: PositiveInt = 4


class _Wait(asyncio.Future[None]):
    """The end of a coroutine's wait.

    Args:
        futures: futures of the turns, or of the environments' answers, that the coroutine waits for.
        due: for answers, the index of the round at whose end they are handed out; 0 for turns.
    """

    def __init__(self, futures: Sequence[asyncio.Future[Any]], due: int = 0) -> None:
        super().__init__()
        self.futures, self.due = futures, due


class Rounds(EngineWrapper):
    """Lets coroutines play episodes apart, with samples from one engine.

    A round begins when every coroutine waits for a sample or for an environment. The engine samples a chunk of all
    turns in one batch, and the environments answer meanwhile. At the end of the round finished turns and due answers
    are handed out, in the order in which they were asked for. So a call of an environment takes a fixed number of
    rounds, whatever its seconds, and the batches of a run do not depend on timing.

    Outside of :meth:`play` requests go to the engine, and calls to the environments, as they come.

    Args:
        engine: engine that samples; it must take requests with ``offset`` and ``chunk_tokens``.
        options: length of a round, and the number of rounds of an answer.

    Raises:
        ConfigurationError: the engine samples whole turns only.
    """

    def __init__(self, engine: Engine, options: RoundOptions) -> None:
        super().__init__(engine)
        self._continuous = ContinuousEngine(engine, options.chunk_tokens, rows=None)
        self._answer = options.answer
        self._number = 0
        self._arrivals: asyncio.Queue[Any] | None = None  # waits, and tasks that have ended, while episodes are played

    async def play(self, plays: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of coroutines that wait for nothing but samples and environments, in order.

        Raises:
            Exception: the first error of a coroutine, which cancels the others.
        """
        tasks = [asyncio.ensure_future(play) for play in plays]
        arrivals = self._arrivals = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(mark_read)
            task.add_done_callback(arrivals.put_nowait)
        left, waits = len(tasks), list[_Wait]()
        try:
            while left:
                arrived = await arrivals.get()
                if isinstance(arrived, _Wait):
                    waits.append(arrived)
                else:
                    arrived.result()  # or its error
                    left -= 1
                while waits and len(waits) == left:
                    waits = await self._round(waits)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            self._arrivals = None

    def apart(self, play: Callable[[Sequence[Any]], Awaitable[Sequence[T]]]) -> Callable[[Sequence[Any]], Any]:
        """Return a function that plays each spec by a call of ``play`` of its own, all in the same rounds.

        Args:
            play: coroutine function that returns a result for each spec; it samples and calls environments through the
                rounds.
        """

        async def played(specs: Sequence[Any]) -> list[T]:
            return [result for (result,) in await self.play(play([spec]) for spec in specs)]

        return played

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`."""
        if self._arrivals is None:
            return await self.engine.sample(requests)
        turns = self._continuous.begin(requests)
        try:
            self._arrivals.put_nowait(wait := _Wait([turn.done for turn in turns]))
            await wait
            return [turn.done.result() for turn in turns]
        finally:
            self._continuous.end(turns)

    async def call(self, caller: EnvironmentCaller, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        """Return one result per call of environments, in order."""
        if self._arrivals is None or not calls:
            return await caller.run(calls)
        answer = asyncio.ensure_future(caller.run(calls))
        try:
            self._arrivals.put_nowait(wait := _Wait([answer], self._number + self._answer))
            await wait
            return answer.result()
        finally:
            answer.cancel()

    async def _round(self, waits: Sequence[_Wait]) -> list[_Wait]:
        """Play a round, and return the waits that it does not end."""
        due = [wait.due for wait in waits if wait.due]
        batch = [self._continuous.batch()] if len(due) < len(waits) else []
        # Without a turn to sample, the next round is that of the first answer.
        self._number = self._number + 1 if batch else min(due)
        answers = [future for wait in waits if 0 < wait.due <= self._number for future in wait.futures]
        await asyncio.gather(*batch, *answers)
        for wait in waits:
            if wait.due <= self._number and all(future.done() for future in wait.futures):
                wait.set_result(None)
        return [wait for wait in waits if not wait.done()]
