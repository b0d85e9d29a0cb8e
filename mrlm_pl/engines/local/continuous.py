"""Generation in chunks: calls of many episodes are batched together, and weights may change while a turn is sampled."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mrlm_pl.concurrency.event_loop import mark_read
from mrlm_pl.engines.base import Engine, EngineWrapper, FinishReason, Sample, SampleRequest, sample_checked
from mrlm_pl.episode import TokenSpan
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.settings import PositiveInt


@dataclass(eq=False)
class ContinuousTurn:
    """A turn in generation; ``done`` has its sample."""

    request: SampleRequest
    session: str
    done: asyncio.Future[Sample]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)

    def next_chunk(self, chunk_tokens: int) -> SampleRequest:
        request, drawn = self.request, len(self.token_ids)
        return replace(
            request,
            token_ids=(*request.token_ids, *self.token_ids),
            session=self.session,
            offset=request.offset + drawn,
            chunk_tokens=chunk_tokens
            if request.chunk_tokens is None
            else min(chunk_tokens, request.chunk_tokens - drawn),
        )

    def take(self, sample: Sample, window: int | None) -> FinishReason | None:
        """Append a chunk; return the finish reason, or None while the turn is unfinished."""
        self.token_ids += sample.token_ids
        self.logprobs += sample.logprobs
        for span in sample.spans or (TokenSpan(len(sample.token_ids), sample.version, sample.engine),):
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.version, last.engine) == (span.version, span.engine):
                self.spans[-1] = replace(last, tokens=last.tokens + span.tokens)
            else:
                self.spans.append(span)
        if sample.finish_reason == "stop":
            return "stop"
        return "length" if len(self.token_ids) >= self.request.limit(window) else None

    def sample(self, reason: FinishReason) -> Sample:
        version = min(span.version for span in self.spans)
        spans = tuple(self.spans) if len(self.spans) > 1 else ()
        return Sample(tuple(self.token_ids), tuple(self.logprobs), reason, version, self.spans[0].engine, spans)


class ContinuousEngine(EngineWrapper):
    """Batches concurrent calls of :meth:`sample` for another engine, in chunks of a few tokens.

    Between two chunks finished turns leave, new turns join, and loaded weights take effect: a running turn keeps its
    tokens with their log-probabilities and version, and continues with the new weights, which compute its whole context
    again. So each token's log-probability is that of one version of the weights given everything before it.

    All calls of :meth:`sample` must come from one event loop.

    Args:
        engine: generates; it must take requests with ``offset`` and ``chunk_tokens``.
        chunk_tokens: maximum number of tokens before others may join or weights may change.
        rows: maximum number of turns in a batch, earlier ones first; None: all.

    Raises:
        ConfigurationError: a number is below 1, or the engine samples whole turns only.
    """

    def __init__(self, engine: Engine, chunk_tokens: PositiveInt = 32, rows: PositiveInt | None = 256) -> None:
        if not engine.takes_chunks:
            raise ConfigurationError(f"{type(engine).__name__} samples whole turns; use it without ContinuousEngine")
        super().__init__(engine)
        self.chunk_tokens, self.rows = chunk_tokens, rows
        self.batches = 0
        self._busy: tuple[float, float | None] = (0.0, None)
        self._turns: list[ContinuousTurn] = []
        self._numbers = itertools.count()
        self._runner: asyncio.Task[None] | None = None

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`.

        Raises:
            EngineError: the engine failed on the batch of a request.
        """
        turns = self.begin(requests)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())
            self._runner.add_done_callback(mark_read)  # turns pass on its error
        try:
            return list(await asyncio.gather(*(turn.done for turn in turns)))
        finally:
            self.end(turns)

    def begin(self, requests: Sequence[SampleRequest]) -> list[ContinuousTurn]:
        """Let the turns of these requests join the next :meth:`batch`."""
        loop = asyncio.get_running_loop()
        turns = []
        for request in requests:
            session = request.session or f"chunk/{next(self._numbers)}/"
            turns.append(ContinuousTurn(request, session, loop.create_future()))
        self._turns += turns
        return turns

    def end(self, turns: Sequence[ContinuousTurn]) -> None:
        """Cancel unfinished turns, and release the caches of sessions of a single turn."""
        for turn in turns:
            turn.done.cancel()  # a cancelled or failed call leaves nothing running
            if not turn.request.session:
                self.engine.release(turn.session)

    async def _run(self) -> None:
        # Concurrent callers share the first batch: let them submit their requests before it is made.
        await asyncio.sleep(0)
        while await self.batch():
            pass

    async def batch(self) -> bool:
        """Sample a chunk of the turns that have begun; False without any. One batch runs at a time."""
        self._turns = [turn for turn in self._turns if not turn.done.done()]
        batch = self._turns[: self.rows]
        if not batch:
            return False
        requests = [turn.next_chunk(self.chunk_tokens) for turn in batch]
        started = time.perf_counter()
        self._busy = self._busy[0], started
        try:
            samples = await sample_checked(self.engine, requests)
        except Exception as error:  # any fault of a request is that of its turn alone
            await self._find_culprits(batch, requests, error)
            return True
        except BaseException as end:  # cancelled, or SystemExit or KeyboardInterrupt of the engine
            for turn in self._turns:
                if not turn.done.done():
                    turn.done.set_exception(end)
            raise
        finally:
            self._busy = self._busy[0] + time.perf_counter() - started, None
            self.batches += 1
        for turn, sample in zip(batch, samples, strict=True):
            self._take(turn, sample)
        return True

    def _take(self, turn: ContinuousTurn, sample: Sample) -> None:
        reason = turn.take(sample, self.engine.window(turn.request.policy))
        if reason is not None and not turn.done.done():
            turn.done.set_result(turn.sample(reason))

    async def _find_culprits(
        self, batch: Sequence[ContinuousTurn], requests: Sequence[SampleRequest], error: Exception
    ) -> None:
        """Ask for each chunk separately, so that a bad request does not fail the others."""
        calls = [sample_checked(self.engine, [request]) for request in requests] if len(batch) > 1 else []
        answers = await asyncio.gather(*calls, return_exceptions=True) or [error]
        for turn, answer in zip(batch, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._take(turn, answer[0])
            elif not turn.done.done():
                turn.done.set_exception(answer)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the engine had requests; any thread may read it."""
        seconds, since = self._busy  # a tuple, so that both are of one moment
        return seconds if since is None else seconds + time.perf_counter() - since

    def close(self) -> None:
        """Close the engine; may be called twice.

        Raises:
            EngineError: turns are still in generation.
        """
        if any(not turn.done.done() for turn in self._turns):
            raise EngineError("the engine is closed while turns are sampled; cancel their callers first")
        super().close()
