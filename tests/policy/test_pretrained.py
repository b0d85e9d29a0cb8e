"""Pretrained models."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.errors import PolicyError
from mrlm_pl.policy import LoRA, Policy, pretrained
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


def test_a_folder_has_no_revisions() -> None:
    with pytest.raises(PolicyError, match=r"model 'builtin:tiny': revision is 'v1', but a folder has no revisions"):
        Policy(revision="v1")
