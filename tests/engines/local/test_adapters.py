"""Policies with adapters on one base: its matrices are held and multiplied once, and each keeps its distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.local.adapters import Adapted, AdaptedWeights, base_of
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.engines.local.team import TeamWeights
from mrlm_pl.policy.lora import LoRA, add_adapter, with_shared_weights
from tests.engines.conftest import FUSED, VOCABULARY, build, request, run
from tests.engines.local.test_engine import forward_logprobs


def adapted(name: str, loras: Sequence[LoRA], **changes: Any) -> dict[str, PreTrainedModel]:
    """Return models with random adapters on one base, by the names of their policies."""
    base = build(name, **changes).requires_grad_(False)
    models = {}
    for policy, lora in zip("pqrs", loras, strict=False):
        model = add_adapter(with_shared_weights(base), lora, policy).get_base_model()
        draw_adapter(model, policy)
        models[policy] = model
    return models


def draw_adapter(model: PreTrainedModel, seed: str) -> None:
    generator = torch.Generator().manual_seed(sum(map(ord, seed)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def engine_of(models: dict[str, PreTrainedModel], **options: Any) -> InProcessEngine:
    engine = InProcessEngine(**options)
    for version, (policy, model) in enumerate(models.items()):
        engine.load(policy, model, version)
    return engine


def weights_of(engine: InProcessEngine, policy: str) -> Any:
    backend = engine._loaded[policy].backend
    assert isinstance(backend, FusedDecoder)
    return backend.weights


def context(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(1, VOCABULARY) for _ in range(length)]


def check(models: dict[str, PreTrainedModel], engine: InProcessEngine, counts: Sequence[int], atol: float) -> None:
    requests = [
        request(context(4 + n, n), n, policy=policy, max_tokens=3 + n)
        for policy, count in zip(models, counts, strict=True)
        for n in range(count)
    ]
    for one, sample in zip(requests, run(engine, *requests), strict=True):
        expected = forward_logprobs(models[one.policy], one.token_ids, sample.token_ids)
        assert sample.logprobs == pytest.approx(expected, abs=atol)


ALL = LoRA(rank=4, alpha=12.0)
SOME = LoRA(rank=2, alpha=3.0, target_modules=["q_proj", "v_proj", "up_proj"])


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.long_after(6)
def test_each_policy_has_its_own_log_probabilities(name: str, counts: tuple[int, ...]) -> None:
    models = adapted(name, [ALL] * 3)
    check(models, engine_of(models), counts, 1e-5)


@pytest.mark.parametrize("loras", [[ALL, LoRA(rank=2), LoRA(rank=7)], [SOME] * 3, [ALL, SOME, ALL]])
def test_ranks_and_layers_of_the_adapters_may_differ(loras: Sequence[LoRA]) -> None:
    models = adapted("qwen2", loras)
    check(models, engine_of(models), (2, 3, 2), 1e-5)


def test_an_adapter_of_the_head_is_applied() -> None:
    models = adapted("llama", [LoRA(rank=2, target_modules=["lm_head", "o_proj"])] * 2, tie_word_embeddings=False)
    check(models, engine_of(models), (2, 2), 1e-5)


def test_one_base_is_held_and_multiplied_for_all() -> None:
    models = adapted("qwen2", [ALL] * 3)
    engine = engine_of(models)
    found = [weights_of(engine, policy) for policy in models]
    assert all(isinstance(weights, AdaptedWeights) and weights.base is found[0].base for weights in found)
    team = TeamWeights([engine._loaded[policy].backend for policy in models], [1, 2, 1])  # type: ignore[misc]
    linears = [linear for layer in team.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert all(isinstance(linear, Adapted) and linear.counts == [1, 2, 1] for linear in linears)
    assert team.head is found[2].head or team.head is found[0].head  # without an adapter: the base's


def test_a_single_policy_adds_its_adapter_to_the_weights_until_another_comes() -> None:
    models = adapted("llama", [ALL] * 2)
    engine = engine_of({"p": models["p"]})
    row = context(6, 1)
    (alone,) = run(engine, request(row, 2, max_tokens=6))
    assert not isinstance(weights_of(engine, "p"), AdaptedWeights)
    engine.load("q", models["q"], 1)
    assert isinstance(weights_of(engine, "p"), AdaptedWeights)
    (now,) = run(engine, request(row, 2, max_tokens=6))
    assert now.token_ids == alone.token_ids
    assert now.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_an_update_of_one_adapter_takes_effect_when_it_is_loaded(own: bool) -> None:
    models = adapted("qwen3", [ALL] * 2)
    engine = engine_of(models, own_weights=own)
    requests = [request(context(5, 3), 4, policy=policy, max_tokens=5) for policy in "pq"]
    before = run(engine, *requests)
    draw_adapter(models["q"], "another")
    if own:
        assert run(engine, *requests) == before
    engine.load("q", models["q"], 7)
    after = run(engine, *requests)
    assert after[0] == before[0]
    assert after[1].version == 7
    expected = forward_logprobs(models["q"], requests[1].token_ids, after[1].token_ids)
    assert after[1].logprobs == pytest.approx(expected, abs=1e-5)


def test_in_bf16_log_probabilities_are_near_those_of_float32() -> None:
    models = adapted("llama", [ALL] * 2)
    check(models, engine_of(models, dtype=torch.bfloat16), (3, 2), 0.1)


def test_adapters_on_copies_of_a_base_are_added_to_the_weights() -> None:
    models = {policy: adapted("llama", [ALL])["p"] for policy in "pq"}
    engine = engine_of(models)
    assert not any(isinstance(weights_of(engine, policy), AdaptedWeights) for policy in models)
    check(models, engine, (2, 2), 1e-5)


def test_another_model_of_a_policy_does_not_share_with_its_own_predecessor() -> None:
    models = adapted("llama", [ALL] * 2)
    engine = engine_of({"p": models["p"]})
    engine.load("p", models["q"], 1)
    assert not isinstance(weights_of(engine, "p"), AdaptedWeights)


def test_models_without_adapters_have_no_base_to_share() -> None:
    model = build("llama")
    assert base_of(model) is None
    engine = engine_of({"p": model, "q": with_shared_weights(model)})
    assert not any(isinstance(weights_of(engine, policy), AdaptedWeights) for policy in "pq")
