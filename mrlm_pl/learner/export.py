"""The models that a run leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from mrlm_pl.durable_files import draft_of, put_in_place, remove
from mrlm_pl.errors import StorageError
from mrlm_pl.policy import Policy


def write_model(policy: Policy, name: str, final: Path, write: bool) -> None:
    """Write a model as a plain Hugging Face folder, which is whole or not there.

    Args:
        policy: the model.
        name: of it, for messages.
        final: the folder.
        write: False on the ranks that only help to put the weights together.

    Raises:
        StorageError: it cannot be written, for example because the disk is full.
    """
    draft = draft_of(final)
    try:
        if write:
            remove(draft)
        policy.save_pretrained(draft, write=write)
        if write:
            put_in_place(draft, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StorageError(
            f"policy {name!r} cannot be written to {str(final)!r}: {error}; free space on the disk, then "
            "resume the run, which writes it from its last checkpoint"
        ) from error
