"""Weights for servers that read them from a folder: each version is written whole before it has its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrlm_pl.errors import EngineError
from mrlm_pl.policy.export import write_model
from mrlm_pl.policy.lora import is_adapter, merged_state

KEPT = 2
"""Versions that stay: the current one, and the one that requests under way may still name."""


def write_version(
    root: Path, policy: str, model: PreTrainedModel, version: int, also: Callable[[Path], None] | None = None
) -> Path:
    """The new folder ``ROOT/POLICY/version-N`` with a model, adapters merged in, as ``from_pretrained`` reads it.

    Args:
        root: of all policies' folders; is created.
        policy: name of the policy.
        model: whose current weights are written.
        version: its number; a folder of the same number is replaced.
        also: writes more files into the folder, such as a tokenizer's.

    Raises:
        EngineError: the folder cannot be written.
    """
    home = root / policy
    target, part = home / f"version-{version:08d}", home / f".part-{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        _save(model, part)
        if also is not None:
            also(part)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
        # By age, not by number: another run may have left greater ones here.
        for old in sorted(home.glob("version-*"), key=lambda folder: folder.stat().st_mtime_ns)[:-KEPT]:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise EngineError(f"policy {policy!r}: its weights cannot be written to {home}: {error}") from error
    return target.resolve()


def _save(model: PreTrainedModel, folder: Path) -> None:
    plain = model
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    write_model(plain, folder, merged_state(model))
