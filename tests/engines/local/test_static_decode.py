"""Decode steps of fixed shapes against those in tensors of exact size, on a CPU; as CUDA graphs on a GPU."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrlm_pl.engines import InProcessEngine, SampleRequest, Sampling
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.local import llama, static_decode
from mrlm_pl.engines.local.generation import Context, Generated, SessionCache
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.engines.local.sampling import Sampler
from mrlm_pl.engines.local.static_decode import Capture, CudaGraphs, StaticDecode, Step, bucket
from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.lora import LoRA, add_adapter
from tests.engines.conftest import FUSED, VOCABULARY, build, generated, request, run
from tests.support.models.device_waits import DeviceWaits


class Captures:
    """Replays steps by running them, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Step, device: torch.device) -> Step:
        self.count += 1
        return step


class Memory(TorchDispatchMode):
    """Collects the memory that operations read within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
        self.read += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        return func(*args, **(kwargs or {}))


def from_living_memory(step: Step, device: torch.device) -> Step:
    """Replay a step by running it; all that its first run read from outside must live, as a graph reads it there."""
    outside: list[StorageWeakRef] = []

    def replay() -> torch.Tensor:
        assert not any(memory.expired() for memory in outside)
        with Memory() as memory:
            logits = step()
        if not outside:
            outside.extend(read for read in memory.read if not read.expired())
        return logits

    return replay


def decoder(name: str = "qwen2", static: StaticDecode | None = None) -> FusedDecoder:
    made = FusedDecoder(build(name, max_position_embeddings=512), torch.float32)
    if static is not None:
        made.rows = static
    return made


def assert_same(found: Sequence[Generated], expected: Sequence[Generated], error: float = 3e-6) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=error)


def prompt(length: int, first: int) -> list[int]:
    return [1 + (first + place * place) % (VOCABULARY - 1) for place in range(length)]


def some_requests(rows: int, most: int, seed: int = 0) -> list[SampleRequest]:
    """Rows of unequal prompts, some of them shared, that end at any step, by a stop token or their limit."""
    return [
        request(
            prompt(3 + 31 * (row // 3 % 4), row // 3),
            seed + row,
            max_tokens=1 + (row * 37) % most,
            stop_ids=(row % VOCABULARY,) if row % 5 == 0 else (),
            temperature=(1.0, 0.6)[row % 2],
        )
        for row in range(rows)
    ]


@pytest.mark.parametrize("name", FUSED)
def test_a_static_step_gives_the_tokens_of_a_dynamic_one(name: str) -> None:
    rows = some_requests(13, 20)
    assert_same(generated(decoder(name, StaticDecode(Captures())), rows), generated(decoder(name), rows))


def test_rows_leave_and_lengths_grow_across_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decode, "_LEAST_LENGTH", 4)
    monkeypatch.setattr(static_decode, "_LEAST_ROWS", 2)
    monkeypatch.setattr(static_decode, "_FIRST_CAPACITY", 8)
    captures, rows = Captures(), some_requests(30, 70)
    backend = decoder(static=StaticDecode(captures))
    assert_same(generated(backend, rows), generated(decoder(), rows))
    before = captures.count
    assert_same(generated(backend, rows), generated(decoder(), rows))  # over memory with the numbers of the first batch
    assert captures.count > before > 4


def test_equal_batches_replay_the_steps_of_the_first_through_changes_of_the_weights() -> None:
    captures = Captures()
    backend, plain = decoder(static=StaticDecode(captures)), decoder()
    rows = [request(prompt(9, row // 4), row, max_tokens=12) for row in range(16)]
    assert_same(generated(backend, rows), generated(plain, rows))
    assert captures.count == 1
    for scale in (1.1, 0.9):
        for one in (backend, plain):
            with torch.no_grad():
                for weight in one.weights.model.parameters():
                    weight.mul_(scale)
            one.refresh()
        found = generated(backend, rows)
        assert_same(found, generated(plain, rows))
    assert captures.count == 1


def test_weights_at_another_place_are_captured_again() -> None:
    captures = Captures()
    backend = decoder(static=StaticDecode(captures))
    rows = [request(prompt(9, 0), row, max_tokens=12) for row in range(8)]
    first = generated(backend, rows)
    model = backend.weights.model
    model.model.norm.weight.data = model.model.norm.weight.data * 2  # in the dtype of the computation: read in place
    backend.refresh()
    other = generated(backend, rows)
    assert captures.count == 2
    assert [one.logprobs for one in first] != [one.logprobs for one in other]
    plain = FusedDecoder(model, torch.float32)
    assert_same(other, generated(plain, rows))


def test_steps_write_their_logits_to_one_place() -> None:
    found: list[torch.Tensor] = []

    def capture(step: Step, device: torch.device) -> Step:
        return lambda: found.append(step()) or found[-1]  # type: ignore[func-returns-value]

    static = StaticDecode(capture)
    backend = decoder(static=static)
    for rows in (30, 9, 30):
        generated(backend, some_requests(rows, 20))
    (place,) = static._logits.values()
    assert place.shape[1] == VOCABULARY
    assert {logits.data_ptr() for logits in found} == {place.data_ptr()}
    assert len({len(logits) for logits in found}) > 1
    assert len(static._steps) > 2


def test_a_prefill_over_more_positions_frees_nothing_that_a_replay_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decode, "_LEAST_LENGTH", 4)
    monkeypatch.setattr(llama, "_ROTATION_SLACK", 0)
    contexts, found = [Context(prompt(length, 0), 1) for length in (64, 30)], []
    for backend in (decoder(static=StaticDecode(from_living_memory)), decoder()):
        with torch.inference_mode():
            _, rows = backend.prefill(contexts, reserve=4)
            for _ in range(3):  # the second step is captured
                rows.step(torch.tensor([3, 5]))
            # 20 tokens after 44 and 25 after 5, side by side: 44 + 25 positions are more than 64 + 4
            states = [rows.states(row, len(context.token_ids)) for row, context in enumerate(contexts)]
            resumed = [
                Context(context.token_ids, 1, known.first(cached))
                for context, known, cached in zip(contexts, states, (44, 5), strict=True)
                if known is not None
            ]
            _, rows = backend.prefill(resumed, reserve=4)
            found.append([rows.step(torch.tensor([3, 5])).clone() for _ in range(3)])
    torch.testing.assert_close(found[0], found[1], atol=3e-6, rtol=0)


def test_an_adapter_is_read_at_one_place() -> None:
    captures = Captures()
    model = build("qwen2")
    adapted = add_adapter(model, LoRA(rank=2), "p")
    backend = FusedDecoder(adapted.get_base_model(), torch.float32)
    backend.rows = StaticDecode(captures)
    rows = [request(prompt(9, 0), row, max_tokens=12) for row in range(8)]
    generated(backend, rows)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.add_(0.1)
    backend.refresh()
    plain = FusedDecoder(adapted.get_base_model(), torch.float32)
    assert_same(generated(backend, rows), generated(plain, rows))
    assert captures.count == 1


def test_decoders_take_turns_in_one_memory() -> None:
    static = StaticDecode(Captures())
    first, second = decoder("qwen2", static), decoder("llama", static)
    for rows in (some_requests(5, 20), some_requests(20, 30), some_requests(9, 10)):
        for backend, plain in ((first, decoder("qwen2")), (second, decoder("llama"))):
            assert_same(generated(backend, rows), generated(plain, rows))


def test_steps_do_not_keep_a_decoder_that_its_engine_has_replaced(make_engine: Callable[..., InProcessEngine]) -> None:
    model = build("qwen2")
    engine = make_engine(model)
    engine._static = StaticDecode(Captures())
    replaced = engine._loaded["p"].backend
    assert isinstance(replaced, FusedDecoder)
    replaced.rows = engine._static
    run(engine, request(prompt(9, 0), max_tokens=4))
    engine.meet_learner(LearnerPlace(precision="bf16-mixed"))
    freed = weakref.ref(replaced)
    del replaced
    engine.load("p", model, 2)
    gc.collect()
    assert freed() is None


def test_sessions_continue_in_static_memory() -> None:
    kept = [SessionCache(2**20), SessionCache(2**20)]
    backends = [decoder(static=StaticDecode(Captures())), decoder()]
    firsts = [request(prompt(5 + row, row), row, max_tokens=6 + row, session=f"s/{row}") for row in range(5)]
    found = [generated(one, firsts, cache) for one, cache in zip(backends, kept, strict=True)]
    assert_same(*found)
    seconds = [
        request([*one.token_ids, *out.token_ids, 3], one.seed, max_tokens=7, session=one.session)
        for one, out in zip(firsts, found[0], strict=True)
    ]
    assert_same(*(generated(one, seconds, cache) for one, cache in zip(backends, kept, strict=True)))


def test_buckets_waste_at_most_a_quarter() -> None:
    for number in range(64, 3000):
        assert number <= bucket(number, 16) <= 1.25 * number
    assert len({bucket(number, 16) for number in range(1, 2049)}) == 4 + 4 * 5  # 4 a doubling above 64


def test_a_step_waits_for_nothing() -> None:
    backend = decoder(static=StaticDecode(Captures()))
    backend.asynchronous = True
    rows = [request(prompt(9, row // 4), row, max_tokens=40) for row in range(8)]
    with DeviceWaits() as device:
        device.place(backend.weights.tensors())
        generated(backend, rows)
    assert len(device.places) == 2 * 40 // 8  # tokens and log-probabilities of 8 steps at once


def test_engines_of_a_process_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture begins with a wait for the whole device, which CUDA rejects within any other capture on it."""
    capturing, begun = threading.Lock(), threading.Semaphore(0)

    class Graph(contextlib.ExitStack):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__()
            begun.release()
            if not capturing.acquire(blocking=False):
                raise RuntimeError("operation not permitted when stream is capturing")
            self.callback(capturing.release)

    monkeypatch.setattr(torch.cuda, "graph", Graph)
    for name, stand_in in {"device": contextlib.nullcontext, "Stream": str, "CUDAGraph": type("Graph", (), {})}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def step() -> torch.Tensor:
        begun.acquire()  # this capture's
        begun.acquire(timeout=0.2)  # another one's, which must not begin
        return torch.zeros(1)

    device = torch.device("cuda")
    with ThreadPoolExecutor(2) as threads:
        captures = [threads.submit(CudaGraphs(), step, device) for _ in range(2)]
        assert all(callable(capture.result()) for capture in captures)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def on_gpu(capture: Capture | None, dtype: torch.dtype) -> FusedDecoder:
    made = FusedDecoder(build("qwen2", max_position_embeddings=512).cuda(), dtype)
    if capture is not None:
        made.rows = StaticDecode(capture)
    return made


class TestOnAGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_replayed_graph_gives_the_numbers_of_the_step_it_was_captured_from(self, dtype: torch.dtype) -> None:
        graphs, eager = on_gpu(CudaGraphs(), dtype), on_gpu(Captures(), dtype)
        for rows in (some_requests(30, 150), some_requests(9, 40), some_requests(30, 150, seed=100)):
            assert_same(generated(graphs, rows), generated(eager, rows), error=0.0)

    def test_a_replayed_graph_gives_the_tokens_of_a_dynamic_step(self) -> None:
        rows = some_requests(30, 150)
        assert_same(
            generated(on_gpu(CudaGraphs(), torch.float32), rows), generated(on_gpu(None, torch.float32), rows), 1e-4
        )

    def test_graphs_read_weights_that_changed_in_place_and_moved(self) -> None:
        graphs, eager = on_gpu(CudaGraphs(), torch.float32), on_gpu(Captures(), torch.float32)
        rows = [request(prompt(9, row // 4), row, max_tokens=30) for row in range(16)]
        for turn in range(4):
            assert_same(generated(graphs, rows), generated(eager, rows), error=0.0)
            for one in (graphs, eager):
                with torch.no_grad():
                    for weight in one.weights.model.parameters():
                        weight.data = weight.data.clone() if turn == 2 else weight.data
                        weight.mul_(1.05)
                one.refresh()

    @pytest.mark.parametrize("session", [False, True])
    def test_a_long_context_needs_no_table_of_tokens_by_tokens(self, session: bool) -> None:
        made = FusedDecoder(build("qwen2", max_position_embeddings=32768).cuda(), torch.float32)
        length = 16_000
        with torch.inference_mode():
            _, rows = made.prefill([Context(prompt(length, 0), 1)], reserve=64)
            states = rows.states(0, length) if session else None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made.prefill([Context(prompt(2 * length, 0) if session else prompt(length, 1), 1, states)], reserve=64)
        heads = made.weights.sizes.heads
        assert torch.cuda.max_memory_allocated() - before < heads * length * length  # of 4 bytes in such a table

    def test_decoders_take_turns_in_one_memory_and_pool(self) -> None:
        static, rows = StaticDecode(CudaGraphs()), some_requests(12, 40)
        decoders = [on_gpu(None, torch.float32), on_gpu(None, torch.bfloat16)]
        plain = [generated(on_gpu(Captures(), one.weights.sizes.dtype), rows) for one in decoders]
        for one in decoders:
            one.rows = static
        for _ in range(3):
            for one, expected in zip(decoders, plain, strict=True):
                assert_same(generated(one, rows), expected, error=0.0)

    def test_steps_are_captured_while_another_thread_computes(self) -> None:
        rows, stopped = some_requests(30, 150), threading.Event()
        expected = generated(on_gpu(Captures(), torch.float32), rows)

        def update() -> int:
            weight, updates = torch.ones(256, 256, device="cuda", requires_grad=True), 0
            while not stopped.is_set():
                inputs = on_device(torch.ones(1 + 997 * updates % 4096, 256), "cuda")
                (inputs @ weight).square().mean().backward()
                weight.grad, updates = None, updates + 1
            return updates

        with ThreadPoolExecutor(1) as learner:
            learning = learner.submit(update)
            try:
                found = [generated(on_gpu(CudaGraphs(), torch.float32), rows) for _ in range(3)]
            finally:
                stopped.set()
        assert learning.result() > 1
        for tokens in found:
            assert_same(tokens, expected, error=0.0)

    def test_the_host_does_not_wait_within_eight_steps(self) -> None:
        backend = on_gpu(CudaGraphs(), torch.bfloat16)
        for checked in (False, False, True):  # the second time captures, the third replays
            with torch.inference_mode():
                logits, states = backend.prefill([Context(prompt(9, 0), 8)], reserve=60)
                sampler = Sampler(range(8), [Sampling()] * 8, 60, backend.device, asynchronous=True)
                logits = logits.expand(8, -1)
                torch.cuda.set_sync_debug_mode("error" if checked else "default")
                try:
                    for n in range(8):
                        tokens, _ = sampler.draw(logits, n)
                        logits = states.step(tokens)
                    if checked:  # the mode sees a wait
                        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                            tokens[0].item()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
