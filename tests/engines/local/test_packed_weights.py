"""Weights in the layout of oneDNN's kernels: the same distribution, and one place of memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.local.adapters import Adapted, AdaptedWeights
from mrlm_pl.engines.local.decoder import Affine, DecoderWeights
from mrlm_pl.engines.local.team import TeamWeights
from mrlm_pl.policy.forward import products
from mrlm_pl.policy.lora import LoRA
from tests.engines.conftest import build, request, run
from tests.engines.local.test_adapters import adapted, engine_of, weights_of
from tests.engines.local.test_compiled_layers import assert_same
from tests.engines.local.test_engine import contexts, forward_logprobs
from tests.policy.forward.test_products import BF16

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")
MakeEngine = Callable[..., InProcessEngine]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)
    monkeypatch.setattr(products, "PACKED", 1)


def projections(weights: DecoderWeights) -> list[Tensor]:
    return [part.weight for layer in weights.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_packed_weights_sample_from_the_model_as_it_was_last_loaded(
    name: str, own: bool, make_engine: MakeEngine
) -> None:
    model, row = build(name), contexts(7)[0]
    engine = make_engine(model, own_weights=own)
    held = projections(weights_of(engine, "p"))
    assert all(weight.is_mkldnn for weight in held)
    (sample,) = run(engine, request(row, max_tokens=8))
    assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    if own:
        assert run(engine, request(row, max_tokens=8))[0].logprobs == sample.logprobs
    engine.load("p", model, 2)
    (sample,) = run(engine, request(row, max_tokens=8))
    assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)
    assert all(one is other for one, other in zip(projections(weights_of(engine, "p")), held, strict=True))


@BF16
@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_packed_weights_in_bf16_give_the_numbers_of_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = DecoderWeights(build(name), torch.bfloat16).layers[1]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(products, "ONEDNN_IS_FASTER", False)
        others = DecoderWeights(build(name), torch.bfloat16).layers[1]
    for part in ("qkv", "gate_up"):
        layer, other = getattr(packed, part), getattr(others, part)
        assert (layer.weight.is_mkldnn, other.weight.is_mkldnn) == (True, False)
        x = torch.randn(3, layer.weight.shape[1], dtype=torch.bfloat16)
        torch.testing.assert_close(layer.apply(x), other.apply(x))
        residual = torch.randn(3, layer.weight.shape[0])
        torch.testing.assert_close(layer.add_to(residual, x), other.add_to(residual, x), rtol=0.02, atol=0.02)


def test_weights_that_are_not_copied_are_not_packed() -> None:
    half = build("qwen3").to(torch.bfloat16)
    down = DecoderWeights(half, torch.bfloat16).layers[1].down.weight
    assert down.data_ptr() == half.model.layers[1].mlp.down_proj.weight.data_ptr()


def test_the_processor_does_not_choose_the_products_of_an_accelerator() -> None:
    x, h, weight = (torch.empty(shape, device="meta") for shape in ((2, 5), (2, 3), (5, 3)))
    with profile() as profiled:
        assert Affine(weight, None).add_to(x, h).shape == x.shape
    names = {event.name for event in profiled.events()}
    assert "aten::addmm" in names
    assert "aten::linear" not in names


def test_policies_on_one_base_share_its_packed_weights() -> None:
    engine = engine_of(adapted("qwen2", [LoRA(rank=2)] * 3))
    layers = [weights_of(engine, policy).layers[0].down for policy in "pqr"]
    assert all(isinstance(layer, Adapted) and layer.weight is layers[0].weight for layer in layers)
    assert layers[0].weight.is_mkldnn
    team = TeamWeights([engine._loaded[policy].backend for policy in "pqr"], [1, 2, 1])  # type: ignore[misc]
    assert isinstance(team.layers[0].down, Adapted)
    assert team.layers[0].down.counts == [1, 2, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_packed_where_its_weight_is_large(
    tied: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, row = build("qwen3", tie_word_embeddings=tied), contexts(7)[0]
    engine = make_engine(model)
    assert weights_of(engine, "p").head.weight.is_mkldnn
    (sample,) = run(engine, request(row, max_tokens=8))
    assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)
    monkeypatch.setattr(products, "PACKED", model.lm_head.weight.numel() + 1)
    assert weights_of(make_engine(model), "p").head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_a_head_of_another_size_is_packed_anew(make_engine: MakeEngine) -> None:
    model, row = build("qwen3", tie_word_embeddings=False), contexts(7)[0]
    engine = make_engine(model, own_weights=True)
    assert weights_of(engine, "p").head.weight.is_mkldnn
    model.resize_token_embeddings(model.config.vocab_size + 8)
    engine.load("p", model, 2)
    (sample,) = run(engine, request(row, max_tokens=8))
    assert weights_of(engine, "p").head.weight.shape == model.lm_head.weight.shape
    assert sample.logprobs == pytest.approx(forward_logprobs(model, row, sample.token_ids), abs=1e-5)


@pytest.mark.parametrize(
    "shared", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)]
)
def test_compiled_layers_read_packed_weights_as_they_were_last_loaded(shared: bool, make_engine: MakeEngine) -> None:
    models = adapted("qwen2", [LoRA(rank=2)] * 2) if shared else {"p": build("llama-bias")}
    plain, compiled = (engine_of(models, compile=on) for on in (False, True))
    assert isinstance(weights_of(compiled, "p"), AdaptedWeights) == shared
    assert all(weight.is_mkldnn for weight in projections(weights_of(compiled, "p")))
    for version in (1, 2):
        rows = [request(row, policy=policy, max_tokens=8) for policy in models for row in contexts(7, 30, 1)]
        assert_same(run(compiled, *rows), run(plain, *rows))
        with torch.no_grad():
            for policy, model in models.items():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
                for engine in (plain, compiled):
                    engine.load(policy, model, version + 1)
    for engine in (plain, compiled):
        engine.close()
