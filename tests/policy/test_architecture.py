"""A model is built again from its class, configuration and adapters, and takes the tensors of the first."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.lora import LoRA, add_adapter
from mrlm_pl.policy.sharding import all_tensors, gathered, is_split, shard, whole
from tests.engines.conftest import FUSED, GENERIC, build

IDS = torch.tensor([[1, 5, 9, 2]])


def filled(architecture: Architecture, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a model of the architecture with these tensors, and with no others."""
    built = architecture.build(torch.device("cpu"))
    targets = all_tensors(built)
    assert targets.keys() == tensors.keys()
    with torch.no_grad():
        for name, target in targets.items():
            assert target.dtype == tensors[name].dtype
            target.copy_(tensors[name])
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_a_model_is_built_again_and_computes_the_same(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    numbers, sent = torch.get_rng_state(), pickle.dumps(Architecture.of(model))
    largest = max(item.numel() * item.element_size() for item in model.parameters())
    assert len(sent) < 40_000 + largest, "no weights are in it"
    rebuilt = filled(pickle.loads(sent), all_tensors(model))
    with torch.no_grad():
        found, wanted = rebuilt(input_ids=IDS).logits, model(input_ids=IDS).logits
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert all(item.requires_grad for item in rebuilt.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (rebuilt.get_output_embeddings().weight is rebuilt.get_input_embeddings().weight) == tied
    assert torch.equal(torch.get_rng_state(), numbers)


def test_adapters_and_what_is_trained_are_part_of_an_architecture() -> None:
    model: Any = build("llama").requires_grad_(False)
    before = Architecture.of(model)
    add_adapter(model, LoRA(rank=2), "p")
    architecture = Architecture.of(model)
    assert architecture == Architecture.of(model)
    assert architecture != before
    rebuilt = filled(architecture, all_tensors(model))
    trained = {name for name, item in rebuilt.named_parameters() if item.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    with torch.no_grad():
        assert torch.equal(rebuilt(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert Architecture.of(model.requires_grad_(False)) != architecture


def test_the_architecture_of_a_sharded_model_is_that_of_the_whole_one() -> None:
    model = build("llama")
    same = copy.deepcopy(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard(model, init_device_mesh("cpu", (1,)))
        with torch.no_grad(), gathered([model]):
            assert is_split(model)
            rebuilt = filled(Architecture.of(model), {name: whole(item) for name, item in all_tensors(model).items()})
    finally:
        dist.destroy_process_group()
    assert type(rebuilt) is type(same)
    assert not is_split(same)
    with torch.no_grad():
        assert torch.equal(rebuilt(input_ids=IDS).logits, same(input_ids=IDS).logits)
