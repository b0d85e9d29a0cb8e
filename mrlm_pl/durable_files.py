"""Atomic, durable writes: readers see the old file or the complete new one, even after a kill."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mrlm_pl.errors import ConfigurationError, writing
from mrlm_pl.grouping import mapped


@contextmanager
def replacing(path: str | Path, *, durable: bool = False, parents: bool = True) -> Iterator[Path]:
    """Yield a draft ``PATH.part`` to write, a file or a folder, which becomes ``path`` at the end of the block.

    If the block raises, the draft is removed and ``path`` stays as it was. A draft that a kill left behind is
    removed first. A device or a pipe, such as /dev/null, is its own draft.

    Args:
        path: file or folder to create or replace; see :func:`put_in_place` for a folder.
        durable: force the data and the folder's entry to the disk, so that a power failure loses neither.
        parents: whether all missing folders are made, or only that of the file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "new" / "report.json"
    >>> with replacing(path) as draft:
    ...     _ = draft.write_text("{}")
    >>> path.read_text(), [item.name for item in path.parent.iterdir()]
    ('{}', ['report.json'])
    """
    path = Path(path)
    if _is_special(path):
        yield path
        return
    draft = draft_of(path)
    remove(draft)
    path.parent.mkdir(parents=parents, exist_ok=True)
    try:
        yield draft
        if durable:
            force_to_disk(draft)
        if draft.is_dir():
            put_in_place(draft, path)
        else:
            os.replace(draft, path)
    except BaseException:  # also an interrupt: no draft is left behind
        with suppress(OSError):
            remove(draft)
        raise
    if durable:
        force_to_disk(path.parent)


def check_writable(option: str, path: Path) -> None:
    """Make the folder of a file, and a draft there that is removed again, before work whose result the file receives.

    Raises:
        ConfigurationError: the file, which the option names, cannot be written.
    """
    if _is_special(path):
        return
    with writing(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
        draft.touch()
        draft.unlink()


def check_new(option: str, path: Path) -> None:
    """Reject a file or folder that exists, and one that cannot be written; see :func:`check_writable`.

    Raises:
        ConfigurationError: the path, which the option names, exists or cannot be written.
    """
    if path.exists():
        raise ConfigurationError(f"{option}: {str(path)!r} exists; name another, or remove it")
    check_writable(option, path)


def _is_special(path: Path) -> bool:
    """Return True for a device, a pipe or a file descriptor, whose place a renamed file would take."""
    target = os.readlink(path) if path.is_symlink() else ""
    descriptor = target.startswith("/proc/") or os.path.realpath(path.parent).startswith("/proc/")
    return path.exists() and (descriptor or not (path.is_file() or path.is_dir()))


def draft_of(path: Path) -> Path:
    """Return the name under which :func:`replacing` writes a file; a kill may leave such a draft."""
    return path.with_name(f"{path.name}.part")


def put_in_place(draft: Path, final: Path) -> None:
    """Rename a complete draft, a file or a folder, to ``final``, which it replaces; a kill leaves one of the two.

    For a moment the replaced one is :func:`former_of` the path.
    """
    former = former_of(final)
    if final.exists():
        remove(former)
        os.rename(final, former)
    os.rename(draft, final)
    force_to_disk(final.parent)
    remove(former)


def former_of(path: Path) -> Path:
    """Return the place to which :func:`put_in_place` moves the replaced file or folder."""
    return path.with_name(f"{path.name}.old")


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Replace ``path`` by indented JSON; infinities and NaN become null.

    Raises:
        OSError: it cannot be written; the error names it, even if the disk is full.
    """
    text = json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as draft:
        try:
            draft.write_text(text, encoding="utf-8")
        except OSError as error:
            error.filename = error.filename or str(path)
            raise


def force_to_disk(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to disk.

    Raises:
        OSError: the file's data cannot be written, for example because the disk is full.
    """
    with suppress(OSError) if path.is_dir() else nullcontext():  # some systems cannot open or flush a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def finite(value: Any) -> Any:
    """Return JSON-like data with infinities and NaN replaced by None: JSON has no such numbers."""
    return mapped(value, lambda item: None if isinstance(item, float) and not math.isfinite(item) else item)


def progress_note(path: Path) -> Path:
    """Return the path of the note on how much of a file is written; it exists until the file is complete."""
    return path.with_name(path.name + ".progress")


def unfinished(path: Path) -> bool:
    """Return whether the command that writes the file is still running or was killed."""
    return progress_note(path).is_file()
