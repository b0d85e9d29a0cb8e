"""Continuous batching in rounds: environments step beside the sampling of other episodes, in an order that is fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mrlm_pl.concurrency.calls import CallResult, EnvironmentCaller
from mrlm_pl.engines.base import Engine, EngineWrapper, Sample, SampleRequest
from mrlm_pl.engines.local.continuous import ContinuousEngine, ContinuousTurn
from mrlm_pl.settings import at_least, check_arguments

T = TypeVar("T")


@check_arguments
@dataclass(frozen=True)
class RoundOptions:
    """Settings of :class:`Rounds`.

    Args:
        piece: most tokens of a turn in a round.
        answer: rounds that an answer of an environment takes; a slower one delays the end of its round.

    Raises:
        ConfigurationError: a value is below 1.
    """

    piece: int = 32
    answer: int = 4

    def __post_init__(self) -> None:
        at_least(1, "data.rounds.", piece=self.piece, answer=self.answer)


@dataclass(frozen=True, eq=False)
class _Wait:
    """A coroutine that waits for the end of a round.

    Args:
        over: set when it may continue.
        turns: that it waits for.
        answer: of the environments that it waits for, else None.
        due: number of the round at whose end the answer is handed out.
    """

    over: asyncio.Future[None]
    turns: Sequence[ContinuousTurn] = ()
    answer: asyncio.Future[list[CallResult]] | None = None
    due: int = 0


class Rounds(EngineWrapper):
    """Lets coroutines play episodes apart, with samples from one engine.

    A round begins when every coroutine waits for a sample or for an environment. The engine samples a piece of all
    turns in one batch, and the environments answer beside it. At the end of the round finished turns and due answers
    are handed out, in the order in which they were asked for. So a call of an environment takes a fixed number of
    rounds, whatever its seconds, and the batches of a run do not depend on timing.

    Outside of :meth:`play` requests go to the engine, and calls to the environments, as they come.

    Args:
        engine: generates; it must take requests with ``offset`` and ``piece``.
        options: length of a round, and rounds of an answer.

    Raises:
        ConfigurationError: the engine samples whole turns only.
    """

    def __init__(self, engine: Engine, options: RoundOptions) -> None:
        super().__init__(engine)
        self._continuous = ContinuousEngine(engine, options.piece, rows=None)
        self._answer = options.answer
        self._waits: list[_Wait] = []
        self._number = self._left = 0
        self._failed = False
        self._settled: asyncio.Event | None = None

    async def play(self, plays: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of coroutines that wait for nothing but samples and environments, in order.

        Raises:
            Exception: the first error of a coroutine, which cancels the others.
        """
        tasks = [asyncio.ensure_future(play) for play in plays]
        self._settled, self._left, self._failed = asyncio.Event(), len(tasks), False
        for task in tasks:
            task.add_done_callback(self._leave)
        try:
            while self._left and not self._failed:
                await self._settled.wait()
                if self._waits and not self._failed:
                    await self._round()
            return [task.result() for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            for wait in self._waits:
                if wait.answer is not None:
                    wait.answer.cancel()
            self._waits, self._settled = [], None

    def apart(self, play: Callable[[Sequence[Any]], Awaitable[Sequence[T]]]) -> Callable[[Sequence[Any]], Any]:
        """Return a function that plays each spec by a call of ``play`` of its own, all in the same rounds.

        Args:
            play: returns a result for each spec; its engine and its calls of environments are those of the rounds.
        """

        async def played(specs: Sequence[Any]) -> list[T]:
            return [result for (result,) in await self.play(play([spec]) for spec in specs)]

        return played

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`."""
        if self._settled is None:
            return await self.engine.sample(requests)
        turns = self._continuous.begin(requests)
        try:
            await self._wait(turns=turns)
            return [turn.done.result() for turn in turns]
        finally:
            self._continuous.end(turns)

    async def call(self, caller: EnvironmentCaller, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        """Return one result per call of environments, in order."""
        if self._settled is None or not calls:
            return await caller.run(calls)
        answer = asyncio.ensure_future(caller.run(calls))
        await self._wait(answer=answer, due=self._number + self._answer)
        return answer.result()

    async def _wait(self, **what: Any) -> None:
        wait = _Wait(asyncio.get_running_loop().create_future(), **what)
        self._waits.append(wait)
        self._settle()
        await wait.over

    def _leave(self, task: asyncio.Future[Any]) -> None:
        self._left -= 1
        self._failed = self._failed or task.cancelled() or task.exception() is not None
        self._settle()

    def _settle(self) -> None:
        if self._settled is not None and (self._failed or len(self._waits) == self._left):
            self._settled.set()

    async def _round(self) -> None:
        assert self._settled is not None
        self._settled.clear()
        answers = [wait for wait in self._waits if wait.answer is not None]
        sampling = len(answers) < len(self._waits)
        # Without a turn to sample, the next round is that of the first answer.
        self._number = self._number + 1 if sampling else min(wait.due for wait in answers)
        due = [wait.answer for wait in answers if wait.answer is not None and wait.due <= self._number]
        batch = [self._continuous.batch()] if sampling else []
        await asyncio.gather(*batch, *due)
        waits, self._waits = self._waits, []
        for wait in waits:
            if wait.due <= self._number and all(turn.done.done() for turn in wait.turns):
                wait.over.set_result(None)
            else:
                self._waits.append(wait)
        self._settle()
