"""Models that tensor parallelism cannot split are rejected with the remedy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.sharding import parallelize
from mrlm_pl.policy.tiny import build_config


@pytest.mark.parametrize(
    ("options", "network"),
    [
        ({"lora": LoRA(rank=2)}, 0),
        ({"lora": LoRA(rank=2, target_modules=["layers.1.self_attn.q_proj"])}, 0),
        ({"int8": "reference"}, 1),
        ({"trained": False, "int8": "weights"}, 0),
    ],
)
def test_layers_that_are_not_plain_are_not_split(options: dict[str, Any], network: int, model_folder: Path) -> None:
    policy = Policy(str(model_folder), **options)
    policy.load(reference=policy.int8 == "reference")
    with pytest.raises(ConfigurationError, match="leave out the policies' lora, int8 and compile, or set trainer"):
        parallelize(policy.networks()[network], SimpleNamespace(size=lambda: 2))


def test_compiled_layers_are_not_split(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load()
    for layer in policy.network.model.layers:
        layer.compile()  # compiles when it is called
    with pytest.raises(ConfigurationError, match="compile"):
        parallelize(policy.network, SimpleNamespace(size=lambda: 2))


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}])
def test_heads_and_units_that_cannot_be_divided_name_the_remedy(changes: dict[str, int]) -> None:
    network = LlamaForCausalLM(build_config(intermediate_size=64, num_hidden_layers=1, **changes))
    with pytest.raises(ConfigurationError, match=r"multiples of 3 key/value .* has 64\); set trainer.strategy.tensor"):
        parallelize(network, SimpleNamespace(size=lambda: 3))
