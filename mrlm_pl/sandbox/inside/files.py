"""Small files of a working folder as data, so that two processes without a common disk see the same files."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

MAX_FILES, MAX_BYTES, MAX_DEPTH = 64, 1 << 20, 8
_PRIVATE = ("-journal", "-wal", "-shm")
"""Endings of what SQLite keeps beside a data base for one process."""


class Files:
    """What changed in a folder since the last look, and the same for changes that come from elsewhere.

    Args:
        root: the folder; the present working folder by default.
    """

    def __init__(self, root: str | None = None) -> None:
        self._root = root or os.getcwd()
        self._seen: dict[str, bytes] = {}

    def changed(self) -> dict[str, str | None]:
        """Paths and contents, in hexadecimal digits, of new and changed files; None for those that are gone.

        Beyond ``MAX_FILES`` files, ``MAX_BYTES`` bytes of all or ``MAX_DEPTH`` folders, files are left out.
        """
        # Contents, not times: two changes within the clock's step would look like one.
        found: dict[str, bytes] = {}
        self._read("", found, 0)
        changes: dict[str, str | None] = dict.fromkeys(self._seen.keys() - found.keys())
        changes |= {path: data.hex() for path, data in found.items() if self._seen.get(path) != data}
        self._seen = found
        return changes

    def apply(self, changes: Any) -> None:
        """Make the same changes here.

        Raises:
            ValueError, TypeError, AttributeError, OSError: they are not what :meth:`changed` returns, or too much.
        """
        for path, content in changes.items():
            parts = path.split("/")
            if len(parts) > MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
                raise ValueError(f"{path!r:.80} is no path of a file in the folder")
            full = os.path.join(self._root, path)
            if content is None:
                self._seen.pop(path, None)
                with suppress(FileNotFoundError):
                    os.remove(full)
                continue
            data = bytes.fromhex(content)
            others = sum(len(other) for name, other in self._seen.items() if name != path)
            if others + len(data) > MAX_BYTES or len(self._seen.keys() | {path}) > MAX_FILES:
                raise ValueError(f"more than {MAX_FILES} files or {MAX_BYTES} bytes of files")
            os.makedirs(os.path.dirname(full), exist_ok=True)
            # In place: who has the file open, such as a data base, reads the new content.
            with open(full, "r+b" if os.path.exists(full) else "wb") as file:
                file.write(data)
                file.truncate()
            self._seen[path] = data

    def _read(self, folder: str, found: dict[str, bytes], depth: int) -> None:
        with os.scandir(os.path.join(self._root, folder)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if depth + 1 < MAX_DEPTH:
                        self._read(f"{path}/", found, depth + 1)
                elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_PRIVATE):
                    room = MAX_BYTES - sum(map(len, found.values()))
                    if len(found) < MAX_FILES and entry.stat(follow_symlinks=False).st_size <= room:
                        with open(entry.path, "rb") as file:
                            found[path] = file.read()
