"""Folders of weights for servers; each version is written completely before it gets its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from mrlm_pl.durable_files import put_in_place
from mrlm_pl.errors import EngineError
from mrlm_pl.policy.export import write_model
from mrlm_pl.policy.lora import merged_state

KEPT = 2
"""Versions to keep: the current one, and the one that running requests may still name."""


def write_version(root: Path, policy: str, model: PreTrainedModel, version: int, also: Callable[[Path], None]) -> Path:
    """Write the folder ``ROOT/POLICY/version-N`` with a model, adapters merged, for ``from_pretrained``; return it.

    Args:
        root: folder of all policies; is created.
        policy: name of the policy.
        model: has the weights.
        version: its number; replaces a folder of the same number.
        also: writes further files into the folder, such as a tokenizer's.

    Raises:
        EngineError: the folder cannot be written.
    """
    home = root / policy
    target, part = home / f"version-{version:08d}", home / f".part-{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        write_model(model, part, merged_state(model))
        also(part)
        put_in_place(part, target)
        # By age, not by number: another run may have left greater ones here.
        for old in sorted(home.glob("version-*"), key=lambda folder: folder.stat().st_mtime_ns)[:-KEPT]:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise EngineError(f"policy {policy!r}: its weights cannot be written to {home}: {error}") from error
    return target.resolve()
