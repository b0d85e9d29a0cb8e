"""The continuous engine against one that samples whole turns, with calls that overlap and weights that change."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines import ContinuousEngine, Engine, InProcessEngine, Sample, SampleRequest
from mrlm_pl.engines.base import EngineWrapper
from mrlm_pl.episode import TokenSpan
from mrlm_pl.errors import ConfigurationError, EngineError
from tests.engines.conftest import VOCABULARY, build, request, run
from tests.engines.local.test_engine import contexts, forward_logprobs


class Watched(EngineWrapper):
    """Notes the batches, and can do something before one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.batches: list[list[SampleRequest]] = []
        self.before: dict[int, Any] = {}

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        if len(self.batches) in self.before:
            self.before[len(self.batches)]()
        self.batches.append(list(requests))
        return await super().sample(requests)


def together(engine: Engine, *calls: Sequence[SampleRequest]) -> list[list[Sample]]:
    async def ask() -> list[list[Sample]]:
        return list(await asyncio.gather(*(engine.sample(call) for call in calls)))

    return asyncio.run(ask())


def loaded(model: PreTrainedModel, own: bool = False) -> Watched:
    engine = InProcessEngine(own_weights=own)
    engine.load("p", model, 0)
    return Watched(engine)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mamba"])
@pytest.mark.long_after(1)
def test_turns_in_chunks_are_the_turns_at_once(name: str) -> None:
    inner = loaded(build(name))
    requests = [
        request(row, seed, max_tokens=5 + 4 * seed, stop_ids=(seed,)) for seed, row in enumerate(contexts(3, 20, 20, 7))
    ]
    whole = run(inner.engine, *requests)
    for chunk_tokens, rows in itertools.product((1, 4, 100), (2, 100)):
        chunks = [
            found for (found,) in together(ContinuousEngine(inner, chunk_tokens, rows), *([one] for one in requests))
        ]
        for one, other in zip(whole, chunks, strict=True):
            assert (one.token_ids, one.finish_reason, one.spans) == (other.token_ids, other.finish_reason, other.spans)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_calls_that_overlap_share_batches_and_leave_when_they_have_finished() -> None:
    inner = loaded(build("qwen2"))
    engine = ContinuousEngine(inner, chunk_tokens=4)
    together(
        engine, [request([1, 2], 0, max_tokens=4)], [request([3], 1, max_tokens=12), request([4], 2, max_tokens=8)]
    )
    assert [len(batch) for batch in inner.batches] == [3, 2, 1]
    assert [one.offset for one in inner.batches[1]] == [4, 4]


def test_the_rows_of_a_batch_are_bounded_and_the_first_come_first() -> None:
    inner = loaded(build("qwen2"))
    together(ContinuousEngine(inner, chunk_tokens=8, rows=2), *([request([n + 1], n, max_tokens=8)] for n in range(5)))
    assert [[one.token_ids[0] for one in batch] for batch in inner.batches] == [[1, 2], [3, 4], [5]]


def test_a_turn_ends_where_the_window_is_full() -> None:
    inner = loaded(build("qwen2"))
    room = 64 - 40
    for chunk_tokens in (room // 2, room, 5):
        ((sample,),) = together(ContinuousEngine(inner, chunk_tokens), [request(contexts(40)[0], 1, max_tokens=100)])
        assert (len(sample.token_ids), sample.finish_reason) == (room, "length")


def test_weights_that_come_meanwhile_continue_the_turn() -> None:
    model, later = build("qwen2"), build("qwen2", seed=1)
    inner = loaded(model, own=True)
    inner.before[2] = lambda: inner.load("p", later, 7)
    row = contexts(9)[0]
    ((sample,),) = together(ContinuousEngine(inner, chunk_tokens=4), [request(row, 5, max_tokens=12, session="s/a")])
    assert sample.spans == (TokenSpan(8, 0, "in_process"), TokenSpan(4, 7, "in_process"))
    assert sample.version == 0
    before = forward_logprobs(model, row, sample.token_ids[:8])
    after = forward_logprobs(later, [*row, *sample.token_ids[:8]], sample.token_ids[8:])
    assert sample.logprobs == pytest.approx([*before, *after], abs=1e-5)
    # A request that begins where the first ended with the later weights draws the same tokens.
    (rest,) = run(inner.engine, request([*row, *sample.token_ids[:8]], 5, max_tokens=12, offset=8))
    assert rest.token_ids == sample.token_ids[8:]


@pytest.mark.parametrize("name", ["qwen2", "llama-bias", "qwen3", "gpt2"])
def test_own_weights_change_with_load_alone(name: str) -> None:
    model = build(name)
    engine = InProcessEngine(own_weights=True)
    engine.load("p", model, 0)
    (before,) = run(engine, request([5, 6, 7], 3, max_tokens=10))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.7).add_(0.1)
    (still,) = run(engine, request([5, 6, 7], 3, max_tokens=10))
    assert (still.token_ids, still.logprobs, still.version) == (before.token_ids, before.logprobs, 0)
    engine.load("p", model, 1)
    (after,) = run(engine, request([5, 6, 7], 3, max_tokens=10))
    assert after.version == 1
    assert after.logprobs == pytest.approx(forward_logprobs(model, [5, 6, 7], after.token_ids), abs=1e-4)
    assert after.logprobs != before.logprobs


def test_a_request_that_cannot_be_answered_fails_alone() -> None:
    engine = ContinuousEngine(loaded(build("qwen2")))

    async def ask() -> list[Any]:
        calls = [engine.sample([request([1], 0)]), engine.sample([request([VOCABULARY], 0)])]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    good, bad = asyncio.run(ask())
    assert len(good[0].token_ids) > 0
    assert isinstance(bad, EngineError)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_the_end_of_the_process_by_the_engine_reaches_every_caller(
    end: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(Watched):
        async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
            raise end

    loop, engine = EventLoopThread(), ContinuousEngine(Ends(loaded(build("qwen2")).engine), rows=1)
    calls = [loop.submit(engine.sample([request([1], seed)])) for seed in (0, 1)]
    for call in calls:
        with pytest.raises(end):
            call.result(timeout=20)
    loop.close()
    del engine
    gc.collect()
    assert "never retrieved" not in caplog.text, "the callers have read it"


def test_a_call_that_is_cancelled_leaves_the_others_alone() -> None:
    inner = loaded(build("qwen2"))
    engine = ContinuousEngine(inner, chunk_tokens=2)

    async def ask() -> list[Sample]:
        gone = asyncio.ensure_future(engine.sample([request([1], 0, max_tokens=40)]))
        kept = asyncio.ensure_future(engine.sample([request([2], 0, max_tokens=6)]))
        while not inner.batches:
            await asyncio.sleep(0)
        gone.cancel()
        return await kept

    (sample,) = asyncio.run(ask())
    assert len(sample.token_ids) == 6
    assert [len(batch) for batch in inner.batches] == [2, 1, 1]


def test_an_engine_in_use_is_not_closed() -> None:
    inner = loaded(build("qwen2"))
    engine = ContinuousEngine(inner)

    async def ask() -> None:
        pending = asyncio.ensure_future(engine.sample([request([1], 0)]))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="while turns are sampled"):
            engine.close()
        await pending
        engine.close()

    asyncio.run(ask())


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="chunk_tokens is 0"):
        ContinuousEngine(InProcessEngine(), chunk_tokens=0)
    inner = loaded(build("qwen2"))
    for offset in (-1, 8):
        with pytest.raises(EngineError, match=f"offset {offset}"):
            run(inner.engine, request([1], 0, max_tokens=8, offset=offset))


def test_a_turn_in_chunks_is_counted_once() -> None:
    inner = loaded(build("qwen2"))
    together(ContinuousEngine(inner, chunk_tokens=4), [request([1, 2], 0, max_tokens=8)])
    assert inner.engine.stats.sampled_tokens == 8


def test_the_waiting_thread_computes() -> None:
    waited: Future[int] = Future()
    waited.set_result(3)
    assert ContinuousEngine(InProcessEngine()).compute_during(lambda: waited) == 3


def test_an_engine_that_gives_too_few_samples_is_told() -> None:
    class Short(Watched):
        async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
            return (await super().sample(requests))[1:]

    inner = Short(loaded(build("qwen2")).engine)
    with pytest.raises(EngineError, match=r"Short gave \d samples? for \d requests?"):
        together(ContinuousEngine(inner), [request([1], 0), request([2], 1)])


def test_a_call_under_way_counts_as_busy() -> None:
    async def play() -> tuple[float, float]:
        going = asyncio.Event()

        class Waits(Watched):
            async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
                await going.wait()
                return await super().sample(requests)

        engine = ContinuousEngine(Waits(loaded(build("qwen2")).engine))
        before = engine.busy_seconds
        turn = asyncio.create_task(engine.sample([request([1], 0)]))
        await asyncio.sleep(0.05)
        meanwhile = engine.busy_seconds
        going.set()
        await turn
        return before, meanwhile

    before, meanwhile = asyncio.run(play())
    assert before == 0.0
    assert meanwhile > 0.0
