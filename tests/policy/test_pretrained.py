"""Pretrained models."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Ernie4_5_MoeConfig

from mrlm_pl.errors import PolicyError
from mrlm_pl.policy import LoRA, Policy, pretrained
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.pretrained import reading_weights
from mrlm_pl.policy.tiny import tiny_model_path


def test_threads_read_weights_one_after_another(tmp_path: Path) -> None:
    """Transformers changes the whole process while one reads."""
    with ThreadPoolExecutor(1) as other, reading_weights(tmp_path):
        assert not other.submit(pretrained._READING.acquire, blocking=False).result()


def test_all_files_of_a_hub_model_are_read_at_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[tuple[str, str, str]] = []
    for name in ("AutoConfig", "AutoTokenizer", "GenerationConfig", "AutoModelForCausalLM"):
        own = getattr(pretrained, name).from_pretrained

        def noted(source: Any, *, revision: str = "none", name: str = name, own: Any = own, **options: Any) -> Any:
            if source == "lab/model":
                read.append((name, source, revision))
            return own(tiny_model_path(), **options)

        monkeypatch.setattr(getattr(pretrained, name), "from_pretrained", noted)
    Policy("lab/model", revision="v1.2").load()
    expected = ["AutoConfig", "AutoTokenizer", "GenerationConfig", "AutoModelForCausalLM"]
    assert read == [(name, "lab/model", "v1.2") for name in expected]
    lora = Policy("lab/model", revision="v1.2", lora=LoRA(rank=2))
    lora.load()
    lora.save_pretrained(tmp_path)
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["revision"] == "v1.2", "PEFT reads the base at it"
    first, second = (Policy("lab/model", revision=revision) for revision in ("v1", "v2"))
    assert first.origin != second.origin, "adapters would share one base"


def test_weights_that_the_family_freezes_stay_frozen(model_folder: Path, tmp_path: Path) -> None:
    """A router's bias has no gradient, for which DDP would wait."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    sizes = {"vocab_size": len(AutoTokenizer.from_pretrained(folder)), "hidden_size": 16, "intermediate_size": 16}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_layer_end_index": 0}
    model = AutoModelForCausalLM.from_config(Ernie4_5_MoeConfig(**sizes, **experts, **heads))
    model.save_pretrained(folder)
    policy = Policy(str(folder))
    policy.load()
    ids = torch.tensor([[3, 4, 5]])
    policy(TokenRows(ids, torch.tensor([3]), torch.tensor([[False, True, True]]))).sum().backward()
    frozen = [name for name, weight in policy.network.named_parameters() if not weight.requires_grad]
    assert frozen == ["model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"]
    assert [name for name, weight in policy.network.named_parameters() if weight.grad is None] == frozen


def test_a_folder_has_no_revisions() -> None:
    with pytest.raises(PolicyError, match=r"model 'builtin:tiny': revision is 'v1', but a folder has no revisions"):
        Policy(revision="v1")
