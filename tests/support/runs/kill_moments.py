"""All states of a run's folder that a kill can leave.

A kill leaves the files on disk, so moments with equal files are the same to the resumed run. One run in this process
visits all of them: before each operation on a file of the folder, and around each hook of Lightning, the folder is
copied if its state is new. Temporary files are also kept half written, as a kill can leave them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.trainer import call

_HOOKS = (
    "_call_callback_hooks",
    "_call_lightning_module_hook",
    "_call_lightning_datamodule_hook",
    "_call_strategy_hook",
)
_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
_listeners: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _listeners and event in _OPERATIONS:
        for listener in tuple(_listeners):
            listener(event, arguments)


_installed: list[bool] = []


@contextmanager
def at_each_moment(folder: Path, look: Callable[[str], None]) -> Iterator[None]:
    """Call ``look`` with a name around each hook and before each operation on the folder's files.

    Args:
        folder: folder of the run; operations elsewhere are ignored.
        look: may read and write files; may raise.
    """
    if not _installed:
        sys.addaudithook(_audit)  # an audit hook stays for the rest of the process
        _installed.append(True)
    inside: list[bool] = []

    def moment(name: str) -> None:
        if not inside:
            inside.append(True)
            try:
                look(name)
            finally:
                inside.clear()

    def operation(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if arguments else ""
        reads = event == "open" and (str(arguments[1] or "").strip("bt") == "r" or isinstance(arguments[0], int))
        if path.startswith(str(folder)) and not reads:
            moment(f"{event} {Path(path).name}")

    patch = pytest.MonkeyPatch()
    for name in _HOOKS:
        original = getattr(call, name)

        def watched(trainer: Any, hook: str, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            moment(f"before {hook}")
            result = _original(trainer, hook, *args, **kwargs)
            moment(f"after {hook}")
            return result

        patch.setattr(call, name, watched)
    _listeners.append(operation)
    try:
        yield
    finally:
        _listeners.remove(operation)
        patch.undo()


class DiskStates:
    """Copies of a folder, one per state that a resumed run can distinguish.

    The progress of a temporary folder distinguishes states after the first kill of a run only: the temporary folders of
    several kills have too many combinations, and the next export removes them first.

    Args:
        below: folder of the copies.
    """

    def __init__(self, below: Path) -> None:
        self.below = below
        self.moments = 0
        self.found: list[tuple[Path, str]] = []
        self._keys: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Forget the last moment: another run starts."""
        self._seen: list[tuple[str, int, int, int]] = []
        self._table_size: int | None = None

    def look(self, folder: Path, moment: str, resumed: bool = False) -> None:
        """Copy the folder, even with half-written temporary files and a torn row, if its state is new.

        The last row of the metrics is torn where it was not there at the moment before: a kill leaves no earlier one
        torn, such as that of an update whose checkpoint is there.

        Args:
            folder: folder of the run.
            moment: name of the next or last event there.
            resumed: whether the run was killed before.
        """
        self.moments += 1
        files = _files(folder)
        if files == self._seen:
            return
        self._seen = files
        self._keep(folder, moment, {}, resumed)
        drafts = [path for path in folder.rglob("*") if path.suffix in (".part", ".partial") and path.is_file()]
        for draft in drafts:
            self._keep(folder, f"{moment}, {draft.name} half written", {draft: draft.stat().st_size // 2}, resumed)
        table, before = folder / "metrics.csv", self._table_size
        self._table_size = table.stat().st_size if table.is_file() else 0
        if before is not None and self._table_size > before:
            self._keep(folder, f"{moment}, the last row torn", {table: self._table_size - 3}, resumed)

    def _keep(self, folder: Path, moment: str, sizes: dict[Path, int], resumed: bool) -> None:
        coarse, fine = _state(folder, sizes, inside_drafts=False), _state(folder, sizes, inside_drafts=True)
        if (coarse if resumed else fine) in self._keys:
            return
        self._keys |= {coarse, fine}
        copy = self.below / f"state-{len(self.found)}"
        if folder.is_dir():
            shutil.copytree(folder, copy)
        for path, size in sizes.items():
            with (copy / path.relative_to(folder)).open("rb+") as file:
                file.truncate(size)
        self.found.append((copy, moment))


def _files(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return a cheap fingerprint of a folder that changes with every write."""
    found, folders = [], [str(folder)] if folder.is_dir() else []
    while folders:
        for entry in os.scandir(folders.pop()):
            state = entry.stat()
            found.append((entry.path, state.st_ino, state.st_size, state.st_mtime_ns))
            if entry.is_dir():
                folders.append(entry.path)
    return found


def _state(folder: Path, sizes: dict[Path, int], inside_drafts: bool) -> str:
    """Return the state that a resumed run depends on: files, their completeness, and the checkpoint's content.

    What earlier runs left without a checkpoint is kept aside and not read again: it would distinguish any number of
    states, as each kill before the first checkpoint adds to it.
    """
    digest = hashlib.sha256(b"fine" if inside_drafts else b"coarse")
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.relative_to(folder).parts[0].startswith("without-checkpoint-"):
            continue
        if not inside_drafts and path.parent.suffix in (".part", ".old"):
            continue
        digest.update(str(path.relative_to(folder)).encode())
        if not path.is_file():
            continue
        digest.update(b"torn" if path in sizes else b"whole")
        if path.suffix == ".ckpt":
            digest.update(path.read_bytes())
    return digest.hexdigest()
