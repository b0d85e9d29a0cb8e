"""The in-process engine against the models' own forward, alone and in batches, over several turns."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from mrlm_pl.engines import InProcessEngine, Sample
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.local import llama
from mrlm_pl.engines.local.decoder import DecoderWeights
from mrlm_pl.engines.local.generation import Context
from mrlm_pl.errors import ConfigurationError, EngineError, NonFiniteError
from tests.engines.conftest import FUSED, GENERIC, VOCABULARY, build, request, run
from tests.support.models.largest_tensor import LargestTensor

MakeEngine = Callable[..., InProcessEngine]


def contexts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


@torch.no_grad()
def forward_logprobs(
    model: PreTrainedModel, context: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Return log-probability of each token by the model's forward over the whole row."""
    logits = model(input_ids=torch.tensor([[*context, *tokens]])).logits[0].float()
    table = (logits / temperature).log_softmax(-1)
    return [table[len(context) - 1 + n, token].item() for n, token in enumerate(tokens)]


@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_log_probabilities_are_those_of_the_models_forward(name: str, make_engine: MakeEngine) -> None:
    model = build(name)
    engine = make_engine(model)
    rows = contexts(3, 9, 9, 17, 1, 5)
    rows[2] = rows[1]
    samples = run(engine, *[request(row, seed, temperature=0.7, max_tokens=12) for seed, row in enumerate(rows)])
    for row, sample in zip(rows, samples, strict=True):
        assert len(sample.token_ids) == 12
        expected = forward_logprobs(model, row, sample.token_ids, 0.7)
        assert sample.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_which_models_take_the_fused_decoder(
    name: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mrlm_pl"):
        make_engine(build(name))
    assert ("its own forward" in caplog.text) == (name in GENERIC)


def test_greedy_equals_transformers_generate(make_engine: MakeEngine) -> None:
    model = build("qwen2")
    row = contexts(8)[0]
    expected = model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=20)[0, 8:].tolist()
    for fused in (True, False):
        (sample,) = run(make_engine(model, fused=fused), request(row, temperature=0, max_tokens=20))
        assert list(sample.token_ids) == expected


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_request_gives_the_same_tokens_alone_and_in_any_batch(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(build(name))
    requests = [
        request(row, seed, max_tokens=3 + 7 * (seed % 3), top_k=5 * (seed % 2), stop_ids=(seed,))
        for seed, row in enumerate(contexts(2, 30, 11, 11, 4, 19, 1, 8))
    ]
    together = run(engine, *requests)
    reordered = run(engine, *reversed(requests))[::-1]
    for one, a, b in zip(requests, together, reordered, strict=True):
        (alone,) = run(engine, one)
        assert alone.token_ids == a.token_ids == b.token_ids
        assert alone.finish_reason == a.finish_reason == b.finish_reason
        assert a.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_seeds_decide_the_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(build("llama"))
    row = contexts(6)[0]
    first = run(engine, *[request(row, seed, max_tokens=16) for seed in range(6)])
    again = run(engine, *[request(row, seed, max_tokens=16) for seed in range(6)])
    assert first == again
    assert len({sample.token_ids for sample in first}) == 6


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_shared_context_is_computed_once(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(build(name))
    first, second = contexts(10, 14)
    run(engine, *[request(row, seed, max_tokens=2) for seed in range(4) for row in (first, second)])
    stats = engine.stats
    assert stats.prefill_tokens == 10 + 14
    assert stats.shared_tokens == 3 * (10 + 14)
    assert (stats.requests, stats.sampled_tokens, stats.decode_tokens) == (8, 16, 8)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_groups_of_any_size_and_length_keep_exact_log_probabilities_while_rows_leave(
    name: str, make_engine: MakeEngine
) -> None:
    model = build(name)
    short, middle, long = contexts(2, 11, 30)
    rows = [long, short, long, middle, long, short]
    limits = [2, 9, 14, 3, 6, 9]
    samples = run(
        make_engine(model),
        *[request(row, s, max_tokens=limit) for s, (row, limit) in enumerate(zip(rows, limits, strict=True))],
    )
    for row, limit, sample in zip(rows, limits, samples, strict=True):
        assert len(sample.token_ids) == limit
        assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
def test_finished_rows_leave_the_batch(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(build(name))
    row = contexts(5)[0]
    # The first token is the last one for 3 of 4 rows, so one row is fed the other 9 tokens.
    samples = run(engine, *[request(row, seed, max_tokens=1 if seed else 10) for seed in range(4)])
    assert [len(sample.token_ids) for sample in samples] == [10, 1, 1, 1]
    assert engine.stats.decode_tokens == 9


def test_a_stop_token_ends_the_sample_and_is_part_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine(build("llama"))
    row = contexts(5)[0]
    (free,) = run(engine, request(row, 3, max_tokens=12))
    stop = free.token_ids[4]
    cut = free.token_ids.index(stop) + 1
    (sample,) = run(engine, request(row, 3, max_tokens=12, stop_ids=(stop, 1000)))
    assert sample.token_ids == free.token_ids[:cut]
    assert (sample.finish_reason, free.finish_reason) == ("stop", "length")
    (last,) = run(engine, request(row, 3, max_tokens=cut, stop_ids=(stop,)))
    assert last.finish_reason == "stop"


def _second_turn(engine: InProcessEngine, session: str) -> tuple[list[list[int]], list[Sample]]:
    """Return three conversations of two turns, the second turn extending the first."""
    rows = contexts(9, 4, 9)
    first = run(
        engine, *[request(r, s, max_tokens=5 + s, session=f"{session}{s}" * bool(session)) for s, r in enumerate(rows)]
    )
    longer = [
        row + list(out.token_ids) + [7, 8, 9][: s + 1] for s, (row, out) in enumerate(zip(rows, first, strict=True))
    ]
    second = run(
        engine,
        *[request(r, 9 + s, max_tokens=6, session=f"{session}{s}" * bool(session)) for s, r in enumerate(longer)],
    )
    return longer, second


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2"])
def test_a_session_computes_only_what_is_new_and_changes_nothing(name: str, make_engine: MakeEngine) -> None:
    model = build(name)
    engine = make_engine(model)
    _, without = _second_turn(engine, "")
    before = engine.stats
    assert before.cached_tokens == 0
    longer, with_cache = _second_turn(engine, "episode/")
    stats = engine.stats
    # New in turn 2: the last sampled token of turn 1, which was never fed, and the 1, 2 and 3 tokens appended.
    assert stats.prefill_tokens - before.prefill_tokens == (9 + 4 + 9) + (2 + 3 + 4)
    assert stats.cached_tokens == sum(map(len, longer)) - (2 + 3 + 4)
    for row, expected, sample in zip(longer, without, with_cache, strict=True):
        assert sample.token_ids == expected.token_ids
        assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


def test_a_model_whose_layers_keep_a_window_generates_without_sessions(make_engine: MakeEngine) -> None:
    model = build("mistral-sliding")
    engine = make_engine(model)
    longer, samples = _second_turn(engine, "e")
    assert engine.stats.cached_tokens == 0
    for row, sample in zip(longer, samples, strict=True):
        assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


def test_a_session_whose_context_was_rewritten_reuses_the_common_beginning(make_engine: MakeEngine) -> None:
    model = build("llama")
    engine = make_engine(model)
    row = contexts(10)[0]
    run(engine, request(row, session="s", max_tokens=4))
    rewritten = [*row[:6], (row[6] + 1) % VOCABULARY, 3, 4]
    (sample,) = run(engine, request(rewritten, 1, session="s", max_tokens=4))
    assert engine.stats.cached_tokens == 6
    assert sample.logprobs == pytest.approx(forward_logprobs(model, rewritten, sample.token_ids), abs=1e-5)


@torch.no_grad()
def test_no_tensor_of_a_long_turn_has_the_square_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    T, model = 512, build("llama", max_position_embeddings=1024)
    monkeypatch.setattr("mrlm_pl.engines.local.decoder.MASK_ELEMENTS", 2**13)
    decoder = llama.FusedDecoder(model, torch.float32)
    whole, other = contexts(T, T)
    with LargestTensor() as sizes:
        _, rows = decoder.prefill([Context(whole[: T // 2], 1)], 4)
        states = rows.states(0, T // 2)
        logits, rows = decoder.prefill([Context(whole, 2, states), Context(other, 1)], 4)
        rows.step(torch.tensor([1, 2, 3]))
    assert sizes.elements < T * T // 2  # a mask of the new half over the whole
    expected = model(input_ids=torch.tensor([whole, other])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_release_and_a_new_version_forget_sessions(make_engine: MakeEngine) -> None:
    model = build("llama")
    engine = make_engine(model)
    row = contexts(10)[0]

    def cached() -> int:
        before = engine.stats.cached_tokens
        run(engine, request(row, session="e/1", max_tokens=2))
        return engine.stats.cached_tokens - before

    assert (cached(), cached()) == (0, 9)
    engine.release("other")
    assert cached() == 9
    engine.release("e/")
    assert (cached(), cached()) == (0, 9)
    engine.load("p", model, 2)
    assert cached() == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "llama-bias", "qwen3", "gpt2"])
def test_load_takes_over_changed_weights(name: str, dtype: torch.dtype | None, make_engine: MakeEngine) -> None:
    model = build(name)
    engine = make_engine(model, dtype=dtype)
    row = contexts(7)[0]
    (old,) = run(engine, request(row, max_tokens=8))
    changed = build(name, seed=1)
    with torch.no_grad():
        for target, source in zip(model.parameters(), changed.parameters(), strict=True):
            target.copy_(source)
    engine.load("p", model, 2)
    (new,) = run(engine, request(row, max_tokens=8))
    (expected,) = run(make_engine(changed, dtype=dtype), request(row, max_tokens=8))
    assert (old.version, new.version) == (1, 2)
    assert new.token_ids == expected.token_ids
    assert new.logprobs == expected.logprobs
    assert new.logprobs != old.logprobs


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_policy_that_is_loaded_again_computes_in_the_precision_of_the_new_run(
    name: str, make_engine: MakeEngine
) -> None:
    model = build(name)
    row = request(contexts(7)[0], max_tokens=8)
    single, half = (run(make_engine(model, dtype=dtype), row)[0] for dtype in (torch.float32, torch.bfloat16))
    assert single.logprobs != half.logprobs
    engine = make_engine(model)
    for version, (precision, expected) in enumerate([("bf16-mixed", half), ("32-true", single)], 2):
        engine.meet_learner(LearnerPlace(precision=precision))
        engine.load("p", model, version)
        assert run(engine, row)[0].logprobs == expected.logprobs
    engine.load("p", model.to(torch.bfloat16), 4)
    assert run(engine, row)[0].logprobs == run(make_engine(model), row)[0].logprobs


def test_loading_again_reuses_the_fused_memory_and_copies_nothing_that_fits() -> None:
    model = build("qwen3")
    module = model.model.layers[1].mlp.down_proj
    weights = DecoderWeights(model, torch.float32)
    held = [(layer.qkv[0].data_ptr(), layer.down[0].data_ptr()) for layer in weights.layers]
    weights.read()
    assert [(layer.qkv[0].data_ptr(), layer.down[0].data_ptr()) for layer in weights.layers] == held
    assert weights.head[0].data_ptr() == model.lm_head.weight.data_ptr()
    down = weights.layers[1].down[0]
    assert down.t().is_contiguous()  # on a CPU products in float32 read the inputs first
    assert torch.equal(down, module.weight)
    half = build("qwen3").to(torch.bfloat16)
    down = DecoderWeights(half, torch.bfloat16).layers[1].down[0]
    assert down.data_ptr() == half.model.layers[1].mlp.down_proj.weight.data_ptr()


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_bfloat16_compute_agrees_with_autocast(name: str, make_engine: MakeEngine) -> None:
    model = build(name)
    row = contexts(12)[0]
    (sample,) = run(make_engine(model, dtype=torch.bfloat16), request(row, max_tokens=12))
    with torch.autocast("cpu", torch.bfloat16):
        expected = forward_logprobs(model, row, sample.token_ids)
    assert sample.logprobs == pytest.approx(expected, abs=0.04)
    assert sample.logprobs != pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


def test_a_bfloat16_module_generates_in_its_own_dtype(make_engine: MakeEngine) -> None:
    model = build("qwen3").to(torch.bfloat16)
    row = contexts(12)[0]
    (sample,) = run(make_engine(model), request(row, max_tokens=12))
    assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=0.1)


def test_a_session_continues_in_bfloat16(make_engine: MakeEngine) -> None:
    model = build("qwen2")
    engine, fresh = (make_engine(model, dtype=torch.bfloat16) for _ in range(2))
    row = contexts(12)[0]
    (first,) = run(engine, request(row, session="e/", max_tokens=6))
    later = (*row, *first.token_ids, 3, 4)
    (second,) = run(engine, request(later, session="e/", max_tokens=6))
    assert engine.stats.cached_tokens == len(row) + len(first.token_ids) - 1
    (expected,) = run(fresh, request(later, max_tokens=6))
    assert second.token_ids == expected.token_ids
    # keys and values are kept in float32, so that only the products' shapes differ
    assert second.logprobs == pytest.approx(expected.logprobs, abs=0.01)


def test_policies_of_different_models_are_served_in_one_call(make_engine: MakeEngine) -> None:
    models = {"p": build("llama"), "q": build("gpt2")}
    engine = make_engine(models["p"])
    engine.load("q", models["q"], 7)
    rows = contexts(4, 6, 8, 3)
    names = ["q", "p", "q", "p"]
    samples = run(
        engine, *[request(r, s, policy=n, max_tokens=6) for s, (r, n) in enumerate(zip(rows, names, strict=True))]
    )
    for row, name, sample in zip(rows, names, samples, strict=True):
        assert sample.version == {"p": 1, "q": 7}[name]
        assert sample.engine == "in_process"
        assert sample.logprobs == pytest.approx(forward_logprobs(models[name], row, sample.token_ids), abs=1e-5)


def test_a_small_token_bound_makes_more_batches_and_the_same_tokens(make_engine: MakeEngine) -> None:
    model = build("llama")
    requests = [request(row, seed, max_tokens=6) for seed, row in enumerate(contexts(5, 5, 20, 8))]
    large = run(make_engine(model), *requests)
    bounded = make_engine(model, max_batch_tokens=22)
    small = run(bounded, *requests)
    assert [s.token_ids for s in small] == [s.token_ids for s in large]


def test_generation_stops_at_the_window(make_engine: MakeEngine) -> None:
    for name in ("llama", "gpt2"):
        engine = make_engine(build(name))
        rows = contexts(60, 63, 10)
        samples = run(engine, *[request(row, max_tokens=20) for row in rows])
        assert [len(sample.token_ids) for sample in samples] == [4, 1, 20]
        assert {sample.finish_reason for sample in samples} == {"length"}
        with pytest.raises(EngineError, match=r"64 tokens leaves no room in the 64-token window of policy 'p'"):
            run(engine, request(contexts(64)[0]))


def test_long_generation_grows_the_cache(make_engine: MakeEngine) -> None:
    model = build("llama", max_position_embeddings=400)
    row = contexts(3)[0]
    samples = run(make_engine(model), request(row, max_tokens=200), request(row[:2], 1, max_tokens=180))
    assert samples[0].logprobs == pytest.approx(forward_logprobs(model, row, samples[0].token_ids), abs=2e-5)
    assert samples[1].logprobs == pytest.approx(forward_logprobs(model, row[:2], samples[1].token_ids), abs=2e-5)


def test_errors_name_the_thing_the_value_and_the_remedy(make_engine: MakeEngine) -> None:
    engine = make_engine(build("llama"))
    with pytest.raises(EngineError, match=r"'q' is not loaded \(loaded: p\)"):
        run(engine, request([1], policy="q"))
    with pytest.raises(EngineError, match="empty context"):
        run(engine, request([]))
    with pytest.raises(EngineError, match=r"token id 48 .* 48"):
        run(engine, request([1, VOCABULARY]))
    with pytest.raises(EngineError, match="not a Linear"):
        engine.load("p", torch.nn.Linear(2, 2), 1)
    for setting in ({"max_batch_tokens": 0}, {"cache_bytes": -1}):
        with pytest.raises(ConfigurationError, match=next(iter(setting))):
            InProcessEngine(**setting)
    engine.close()
    engine.close()
    engine.release("")
    with pytest.raises(EngineError, match="closed"):
        run(engine, request([1]))


def test_logits_that_are_not_finite_stop_the_run(make_engine: MakeEngine) -> None:
    for name in ("llama", "gpt2"):
        model = build(name)
        engine = make_engine(model, version=5)
        with torch.no_grad():
            model.get_output_embeddings().weight.fill_(float("nan"))
        engine.load("p", model, 6)
        for settings in ({}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0}):
            with pytest.raises(NonFiniteError, match="policy 'p' version 6"):
                run(engine, request([1, 2], max_tokens=3, **settings))


def test_a_module_in_training_mode_generates_without_dropout_and_stays_in_training_mode(
    make_engine: MakeEngine,
) -> None:
    for name in ("llama", "gpt2"):
        model = build(name)
        row = contexts(6)[0]
        expected = None
        for training in (False, True):
            model.train(training)
            (sample,) = run(make_engine(model), request(row, max_tokens=10))
            assert all(module.training == training for module in model.modules())
            expected = expected or sample
            assert sample == expected


def test_the_event_loop_runs_on_while_tokens_are_made(make_engine: MakeEngine) -> None:
    model = build("gpt2")
    engine = make_engine(model)
    ticks = threading.Event()
    inside = threading.Event()

    def hook(*_: object) -> None:
        inside.set()
        assert ticks.wait(100)  # only the event loop sets it, so a blocked loop would fail here

    model.register_forward_pre_hook(hook)

    async def scenario() -> list[Sample]:
        sampling = asyncio.ensure_future(engine.sample([request([1, 2], max_tokens=2)]))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        ticks.set()
        return await sampling

    assert len(asyncio.run(scenario())[0].token_ids) == 2


def test_training_after_generation_still_has_gradients_and_no_global_generator_moved(make_engine: MakeEngine) -> None:
    for name in ("llama", "gpt2"):
        model = build(name)
        before = torch.get_rng_state()
        run(make_engine(model), request([1, 2, 3], max_tokens=4))
        assert torch.equal(before, torch.get_rng_state())
        model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
