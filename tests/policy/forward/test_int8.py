"""Frozen weights in int8: the rounding, where it is rejected, and what engines, references and exports make of it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mrlm_pl.algorithms import DPO, GRPO
from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.engines.base import SampleRequest
from mrlm_pl.errors import ConfigurationError, PolicyError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.policies.reference import KL, ReferenceSync
from mrlm_pl.policy import Policy
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.forward.int8 import Int8Linear, int8_layers, linear_layers, to_int8
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.lora import LoRA, merged_state
from mrlm_pl.policy.sharding import all_tensors
from tests.engines.conftest import build

ROWS = TokenRows(torch.arange(4, 44).view(4, 10), torch.full((4,), 10), torch.arange(10).expand(4, 10) > 3)


def loaded(**options: Any) -> Policy:
    policy = Policy("builtin:tiny", **options)
    policy.load()
    return policy


def test_each_output_has_its_own_scale() -> None:
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[127.0, -63.4, 0.6], [0.0, 0.0, 0.0], [0.0, 2.54, -1.27]]))
        linear.bias.copy_(torch.tensor([0.5, 1.0, 0.0]))
    layer = Int8Linear(linear)
    assert layer.rounded.tolist() == [[127, -63, 1], [0, 0, 0], [0, 127, -64]]
    assert layer.scale.tolist() == pytest.approx([1.0, 0.0, 0.02])
    found = layer(torch.tensor([[1.0, 1.0, 2.0]]))
    assert found.flatten().tolist() == pytest.approx([127 - 63 + 2 + 0.5, 1.0, 0.02 * (127 - 128)], abs=1e-5)
    assert layer.weight.flatten().tolist()[-1] == pytest.approx(-1.28)


def test_autocast_multiplies_in_its_own_dtype() -> None:
    linear = nn.Linear(64, 32)
    layer, x = Int8Linear(linear), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, wanted = layer(x), linear(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert (found.float() - linear(x)).abs().max() < 0.05


def test_a_frozen_policy_takes_a_quarter_of_the_memory_of_its_linear_layers() -> None:
    plain, small = loaded(trained=False), loaded(trained=False, int8="weights")
    names = int8_layers(small.model)
    assert names == linear_layers(plain.model)
    assert len(names) == 7 * plain.config.num_hidden_layers
    assert "lm_head" not in names

    def size(policy: Policy) -> int:
        layers = map(policy.model.get_submodule, names)
        return sum(item.numel() * item.element_size() for layer in layers for item in layer.parameters())

    outputs = sum(plain.model.get_submodule(name).out_features for name in names)
    assert size(small) == size(plain) / 4 + 4 * outputs
    found, wanted = small(ROWS), plain(ROWS)
    assert 1e-4 < (found - wanted).abs().max() < 0.3
    assert not any(weight.requires_grad for weight in small.parameters())


def test_the_head_of_a_classifier_is_not_rounded() -> None:
    assert linear_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))) == ["0"]


def test_a_model_without_linear_layers_is_refused() -> None:
    model = build("gpt2")
    with pytest.raises(PolicyError, match="GPT2LMHeadModel has no linear layers to quantize"):
        to_int8(model, linear_layers(model))


def test_a_model_that_reads_a_weight_itself_reads_the_rounded_one() -> None:
    model, plain = build("mamba"), build("mamba")
    to_int8(model, linear_layers(model))
    plain.load_state_dict(merged_state(model))
    torch.testing.assert_close(model(ROWS.token_ids % 48).logits, plain(ROWS.token_ids % 48).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("own_weights", [False, True])
def test_an_engine_generates_with_the_rounded_weights(own_weights: bool) -> None:
    policy = loaded(trained=False, int8="weights")
    engine = InProcessEngine(own_weights=own_weights)
    engine.load("p", policy.network, 0)
    context = (10, 11, 12, 13)
    request = SampleRequest(context, "p", seed=1, sampling=Sampling(max_tokens=12), stop_ids=())
    (sample,) = asyncio.run(engine.sample([request]))
    engine.close()
    row = torch.tensor([context + sample.token_ids])
    mask = torch.arange(row.shape[1])[None] >= len(context)
    rows = TokenRows(row, torch.tensor([row.shape[1]]), mask)
    logp = policy(rows)[mask]
    assert torch.allclose(logp, torch.tensor(sample.logprobs), atol=1e-4)
    plain = loaded(trained=False)(rows)[mask]
    assert not torch.allclose(logp, plain, atol=1e-4)


def test_another_process_builds_the_same_model() -> None:
    model = loaded(trained=False, int8="weights").model
    rebuilt = pickle.loads(pickle.dumps(Architecture.of(model))).build(torch.device("cpu"))
    targets, tensors = all_tensors(rebuilt), all_tensors(model)
    assert targets.keys() == tensors.keys()
    with torch.no_grad():
        for name, target in targets.items():
            assert target.dtype == tensors[name].dtype
            target.copy_(tensors[name])
        assert torch.equal(rebuilt(ROWS.token_ids).logits, model(ROWS.token_ids).logits)


def test_the_export_is_the_model_that_was_read_and_a_servers_copy_is_rounded(tmp_path: Path) -> None:
    plain, small = loaded(trained=False), loaded(trained=False, int8="weights")
    small.save_pretrained(tmp_path)
    exported = Policy(str(tmp_path))
    exported.load()
    assert torch.equal(exported(ROWS), plain(ROWS))
    merged = merged_state(small.network)
    assert merged.keys() == plain.model.state_dict().keys()
    plain.model.load_state_dict(merged)
    assert torch.allclose(plain(ROWS), small(ROWS), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"int8": "weights"}, "is trained, and updates are smaller than the steps of int8; set `trained: false`"),
        ({"int8": "reference", "trained": False}, "the policy is frozen; set `int8: weights`"),
        ({"int8": "reference", "lora": LoRA()}, "with lora, whose reference is the base that it is trained on"),
        ({"int8": "weights", "trained": False, "served_by": "a:1"}, "a:1 has the weights; set the precision there"),
        ({"int8": "int4"}, "int8 is 'int4'; choose from weights, reference"),
    ],
)
def test_weights_that_are_not_frozen_here_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((PolicyError, ConfigurationError), match=message):
        Policy("builtin:tiny", **options)


def test_a_reference_in_int8_is_close_to_the_policy() -> None:
    algorithm = GRPO({"main": Policy("builtin:tiny", int8="reference")}, kl=KL(0.1))
    algorithm.read_weights()
    policy = algorithm.policy("main")
    assert int8_layers(policy.reference)
    assert not int8_layers(policy.model)
    gap = (policy.reference_logprobs(ROWS) - policy(ROWS)).abs().max()
    assert 1e-4 < gap < 0.3
    assert not any(policy.is_saved(name) for name in policy.state_dict() if name.startswith("reference."))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (GRPO, "the run keeps no reference copy of its weights, as without a kl.coefficient; leave `int8` out"),
        (DPO, "the run keeps no reference copy of its weights"),
        (partial(GRPO, kl=KL(0.1), reference_sync=ReferenceSync(4)), "its reference moves every 4 steps, by less"),
    ],
)
def test_a_reference_that_is_missing_or_moves_is_not_rounded(make: Callable[..., Algorithm], message: str) -> None:
    algorithm = make({"main": Policy("builtin:tiny", int8="reference")})
    with pytest.raises(ConfigurationError, match=message):
        algorithm.read_weights()
