"""Models that run through their own forward: how their cache is used, and that it never shows in the numbers."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.local.cache_check import cache_use, warn_of_cache
from mrlm_pl.engines.local.transformers_model import CacheUse, GenericModel
from mrlm_pl.policy.forward.logprobs import token_logprobs
from mrlm_pl.policy.forward.packing import TokenRows
from tests.engines.conftest import build, request, run
from tests.engines.local.test_engine import contexts, forward_logprobs
from tests.support.models.model_families import context_rows, measure, plain_logprobs, tiny_model
from tests.support.runs.logs import logged_here

MakeEngine = Callable[..., InProcessEngine]
EXACT = 1e-4
"""Log-probabilities in single precision; the faults that the checks below found were 0.05 to 3."""


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("falcon_h1", "padded"),
        ("qwen3_next", "padded"),
        ("lfm2", "padded"),
        ("mamba2", "padded"),
        ("mamba", "by length"),
        ("xlstm", "recomputed"),
        ("recurrent_gemma", "recomputed"),
        ("mpt", "padded, sessions"),
        ("gpt_neo", "padded, sessions"),
        ("minimax", "padded"),
    ],
)
@pytest.mark.long_after(1)
def test_groups_and_later_turns_of_every_kind_of_cache(family: str, cache: str) -> None:
    found = measure(tiny_model(family))
    assert found["cache"] == cache
    for what in ("engine", "session", "batch", "learner", "gradient"):
        assert found[what] < EXACT, (what, found)


@pytest.mark.parametrize("family", ["gpt_neo", "mpt"])
def test_rows_beside_one_that_ends_at_the_window_go_on(family: str, make_engine: MakeEngine) -> None:
    """Their tables of positions have no place for the padding beside the longer row."""
    model = tiny_model(family)  # with a window of 128
    engine = make_engine(model)
    rows = context_rows(124, 60)
    samples = run(engine, *(request(row, seed, max_tokens=8) for seed, row in enumerate(rows)))
    assert [len(sample.token_ids) for sample in samples] == [4, 8]
    for row, sample in zip(rows, samples, strict=True):
        expected = plain_logprobs(model, [*row, *sample.token_ids])[len(row) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("family", "cache"), [("llama", "recomputed"), ("mistral", "padded")])
@pytest.mark.long_after(1)
def test_a_window_that_the_model_does_not_have_is_not_that_of_its_cache(family: str, cache: str) -> None:
    """Llama attends to all tokens whatever its configuration says, and a cache of transformers drops them."""
    found = measure(tiny_model(family, sliding_window=20))  # more than the rows of the check, less than those here
    assert found["cache"] == cache
    for what in ("engine", "session", "batch", "learner", "gradient"):
        assert found[what] < EXACT, (what, found)


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_the_check_of_a_cache_reads_no_generator_and_leaves_the_module_as_it_was(name: str) -> None:
    model = build(name).train()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    cache_use(GenericModel(model, torch.float32))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_cache_is_used_under_its_newer_name() -> None:
    model = build("gpt2")
    original = model.forward
    name = next(name for name in ("past_key_values", "cache") if name in inspect.signature(original).parameters)

    def forward(input_ids: Any, attention_mask: Any = None, cache: Any = None, use_cache: bool = False) -> Any:
        output = original(input_ids=input_ids, use_cache=use_cache, **{name: cache})
        return SimpleNamespace(logits=output.logits, cache=output.get(name))

    model.forward = forward
    assert cache_use(GenericModel(model, torch.float32)).use == CacheUse("batch_select_indices")


@pytest.mark.parametrize(
    ("broken", "use"),
    [
        ((), CacheUse("batch_select_indices", padded=True, sessions=True)),
        (("batch_select_indices",), CacheUse("reorder_cache", padded=True, sessions=True)),
        (("batch_select_indices", "reorder_cache"), CacheUse()),
    ],
)
def test_a_cache_that_picks_wrong_rows_is_not_used(
    broken: tuple[str, ...],
    use: CacheUse,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in broken:
        monkeypatch.setattr(DynamicCache, name, lambda self, index: None)
    warn_of_cache.cache_clear()
    model = build("gpt2")
    assert cache_use(GenericModel(model, torch.float32)).use == use
    engines = [make_engine(model), make_engine(model)]
    warnings = [record.getMessage() for record in logged_here(caplog) if record.levelno == logging.WARNING]
    assert len(warnings) == (not use.cached)
    assert all("'gpt2'" in text and "every token recomputes its row" in text for text in warnings)
    rows = contexts(3, 9, 9, 17)
    rows[2] = rows[1]
    samples = run(engines[0], *[request(row, seed, max_tokens=5 + seed) for seed, row in enumerate(rows)])
    for row, sample in zip(rows, samples, strict=True):
        assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


def test_a_model_that_sees_padding_runs_one_length_at_a_time(make_engine: MakeEngine) -> None:
    model = build("gpt2")
    original = model.forward

    def forward(
        input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        return original(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)

    model.forward = forward
    assert cache_use(GenericModel(model, torch.float32)).use == CacheUse("batch_select_indices")
    rows = contexts(3, 9, 9, 17)
    requests = [request(row, seed, max_tokens=4 + seed, session=f"{seed}") for seed, row in enumerate(rows)]
    engine = make_engine(model)
    for _ in range(2):
        for row, sample in zip(rows, run(engine, *requests), strict=True):
            assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


def test_a_model_that_sees_later_tokens_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_cache.cache_clear()
    engine = InProcessEngine()
    engine.load("p", tiny_model("bert"), 0)
    assert "not causal" not in caplog.text
    engine.load("q", tiny_model("bert", is_decoder=False), 0)
    assert "family 'bert' are not causal" in caplog.text
    assert "is_decoder" in caplog.text
    engine.close()


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.2, 1.5, 2.0, 3.0],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.long
def test_rows_on_both_sides_of_a_long_rotary_embedding(make_engine: MakeEngine) -> None:
    """Short and long rows, and one that crosses from one to the other: each as it is alone, and as the learner says."""
    model = build("llama", model_type="phi3", sliding_window=None, **LONGROPE)
    engine = make_engine(model)
    rows = contexts(5, 12, 16, 17, 30, 12)
    rows[5] = rows[1]
    for _ in range(2):
        requests = [request(row, seed, max_tokens=8, session=f"{seed}") for seed, row in enumerate(rows)]
        together = run(engine, *requests)
        for one, sample in zip(requests, together, strict=True):
            (alone,) = run(make_engine(model), one)
            assert alone.token_ids == sample.token_ids
            assert alone.logprobs == pytest.approx(sample.logprobs, abs=1e-5)
            ids = torch.tensor([[*one.token_ids, *sample.token_ids]])
            mask = torch.arange(ids.shape[1])[None] >= len(one.token_ids)
            learner = token_logprobs(model, TokenRows(ids, torch.tensor([ids.shape[1]]), mask))[mask].tolist()
            assert sample.logprobs == pytest.approx(learner, abs=1e-5)
            for n, token in enumerate(sample.token_ids):
                before = [*one.token_ids, *sample.token_ids[:n]]
                assert sample.logprobs[n] == pytest.approx(plain_next(model, before, token), abs=1e-5)
        rows = [[*row, *sample.token_ids, 3] for row, sample in zip(rows, together, strict=True)]
    assert engine.stats.cached_tokens > 0


@torch.no_grad()
def plain_next(model: Any, before: list[int], token: int) -> float:
    """Return log-probability of a token after these, which alone are given to the model."""
    logits = model(input_ids=torch.tensor([before])).logits[0, -1]
    return float(logits.log_softmax(-1)[token])
