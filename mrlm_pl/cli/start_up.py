"""What a command does once, and not while its modules are imported: collect garbage, and read transformers' folders."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any


def hold_collection() -> None:
    """Collect no garbage until :func:`release_collection`.

    Imported modules are none, and looking for it among their growing number of objects takes a fifth of their import.
    """
    gc.disable()


def release_collection() -> None:
    """Collect garbage again, if that is held, and never look at the objects that exist: the process keeps them."""
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
