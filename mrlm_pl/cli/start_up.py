"""Work that a command does once, after the imports of its modules: collect garbage, and read transformers' folders."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any


def pause_garbage_collection() -> None:
    """Collect no garbage until :func:`resume_garbage_collection`.

    Imported modules leave none, and searching their growing number of objects takes a fifth of the import.
    """
    gc.disable()


def resume_garbage_collection() -> None:
    """Collect garbage again, if that is paused, but never search the objects that exist: the process keeps them."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def read_model_folders_once() -> None:
    """Import transformers, and let it read the source of its models once.

    It reads all model files when it is imported, and again for ``transformers.models``, because its own cache knows the
    folder by another path there.
    """
    from transformers.utils import import_utils

    read = getattr(import_utils, "create_import_structure_from_path", None)
    if read is None or getattr(read, "__module__", "") == __name__:
        return

    def read_once(path: str | Path) -> Any:
        path = Path(path)
        return read(path.parent if path.suffix else path)

    import_utils.create_import_structure_from_path = read_once  # type: ignore[assignment]
