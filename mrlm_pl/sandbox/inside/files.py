"""Small files of a working folder as data, so that two processes without a common disk see the same files."""

from __future__ import annotations

import base64
import json
import os
import stat
import zlib
from contextlib import suppress
from typing import Any

MAX_FILES, MAX_BYTES, MAX_DEPTH = 64, 1 << 20, 8
MAX_PACKED_BYTES = 32 << 20
"""Maximum number of bytes of the files of a system that are packed."""

_PRIVATE = ("-journal", "-wal", "-shm")
"""Suffixes of the files that SQLite keeps next to a database for one process."""


class Files:
    """Changes in a folder since the last look, and the application of changes from elsewhere.

    Args:
        root: folder to watch; by default the current working folder.
    """

    def __init__(self, root: str | None = None) -> None:
        self._root = root or os.getcwd()
        self._seen: dict[str, tuple[bytes, int]] = {}

    def changed(self) -> dict[str, list[Any] | None]:
        """Return paths, contents (in hexadecimal digits) and modes of new and changed files; None for removed ones.

        Beyond ``MAX_FILES`` files, ``MAX_BYTES`` bytes of all or ``MAX_DEPTH`` folders, files are left out.
        """
        # Contents, not times: two changes within the clock's step would look like one.
        files: dict[str, tuple[bytes, int]] = {}
        self._read("", files, 0)
        changes: dict[str, list[Any] | None] = dict.fromkeys(self._seen.keys() - files.keys())
        changes |= {path: [file[0].hex(), file[1]] for path, file in files.items() if self._seen.get(path) != file}
        self._seen = files
        return changes

    def apply(self, changes: Any) -> None:
        """Apply such changes to this folder.

        Raises:
            ValueError, TypeError, AttributeError, OSError: the changes are too many, or not as from :meth:`changed`.
        """
        for path, content in changes.items():
            parts = path.split("/")
            if len(parts) > MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
                raise ValueError(f"{path!r:.80} is not a path of a file in the folder")
            full = os.path.join(self._root, path)
            if content is None:
                self._seen.pop(path, None)
                with suppress(FileNotFoundError):
                    os.remove(full)
                continue
            data, mode = bytes.fromhex(content[0]), content[1] & 0o777
            other_bytes = sum(len(other) for name, (other, _) in self._seen.items() if name != path)
            if other_bytes + len(data) > MAX_BYTES or len(self._seen.keys() | {path}) > MAX_FILES:
                raise ValueError(f"more than {MAX_FILES} files or {MAX_BYTES} bytes of files")
            os.makedirs(os.path.dirname(full), exist_ok=True)
            # In place: a process with the file open, such as a database, reads the new content.
            exists = os.path.exists(full)
            if exists and not os.access(full, os.W_OK):
                os.chmod(full, 0o600)
            with open(full, "r+b" if exists else "wb") as file:
                file.write(data)
                file.truncate()
            if os.stat(full).st_mode & 0o777 != mode:
                os.chmod(full, mode)
            self._seen[path] = data, mode

    def _read(self, folder: str, files: dict[str, tuple[bytes, int]], depth: int) -> None:
        with os.scandir(os.path.join(self._root, folder)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if depth + 1 < MAX_DEPTH:
                        self._read(f"{path}/", files, depth + 1)
                elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_PRIVATE):
                    bytes_left = MAX_BYTES - sum(len(data) for data, _ in files.values())
                    status = entry.stat(follow_symlinks=False)
                    if len(files) < MAX_FILES and status.st_size <= bytes_left:
                        files[path] = _read_content(entry.path, status.st_mode & 0o777), status.st_mode & 0o777


def pack(root: str) -> str:
    """Return all that is in a folder, as a text: folders, files, links and pipes, with their modes and times.

    Mounted file systems in it are left out.

    Raises:
        ValueError: the files hold more than ``MAX_PACKED_BYTES``.
    """
    entries: list[list[Any]] = []
    pending, size, device = [root], 0, os.lstat(root).st_dev
    while pending:
        path = pending.pop()
        status = os.lstat(path)
        if status.st_dev != device:
            continue
        mode, content = status.st_mode & 0o7777, ""
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFLNK:
            content = os.readlink(path)
        elif kind == stat.S_IFREG:
            size += status.st_size
            if size > MAX_PACKED_BYTES:
                raise ValueError(f"the files of the system hold more than {MAX_PACKED_BYTES} bytes")
            content = _read_content(path, mode).decode("latin-1")
        elif kind == stat.S_IFDIR:
            if mode & 0o500 != 0o500:
                os.chmod(path, mode | 0o500)
            pending += [os.path.join(path, name) for name in os.listdir(path)]
        elif kind != stat.S_IFIFO:
            continue  # sockets belong to a process
        entries.append([path, kind, mode, status.st_atime_ns, status.st_mtime_ns, content])
    for path, kind, mode, accessed, modified, _ in reversed(entries):
        if kind == stat.S_IFDIR:  # as it was before it was looked into
            os.utime(path, ns=(accessed, modified))
            os.chmod(path, mode)
    return base64.b64encode(zlib.compress(json.dumps(entries).encode(), 1)).decode()


def unpack(root: str, text: str) -> None:
    """Make a folder hold exactly what :func:`pack` found in it."""
    _clear(root, os.lstat(root).st_dev)
    entries = json.loads(zlib.decompress(base64.b64decode(text)))
    for path, kind, _, _, _, content in entries:
        if kind == stat.S_IFDIR:
            os.makedirs(path, exist_ok=True)
        elif kind == stat.S_IFLNK:
            os.symlink(content, path)
        elif kind == stat.S_IFIFO:
            os.mkfifo(path)
        else:
            with open(path, "wb") as file:
                file.write(content.encode("latin-1"))
    for path, kind, mode, accessed, modified, _ in reversed(entries):  # making the content of a folder changes its time
        if kind != stat.S_IFLNK:
            os.chmod(path, mode)
        os.utime(path, ns=(accessed, modified), follow_symlinks=False)


def _clear(folder: str, device: int) -> None:
    """Remove the content of a folder, except for mounted file systems and the folders that lead to them."""
    os.chmod(folder, 0o700)
    for entry in os.scandir(folder):
        if entry.stat(follow_symlinks=False).st_dev != device:
            continue
        if entry.is_dir(follow_symlinks=False):
            _clear(entry.path, device)
            with suppress(OSError):  # it is a mount, or holds one
                os.rmdir(entry.path)
        else:
            os.remove(entry.path)


def _read_content(path: str, mode: int) -> bytes:
    """Return the content of a file, even if its owner may not read it at present."""
    readable = os.access(path, os.R_OK)
    if not readable:
        os.chmod(path, mode | 0o400)
    try:
        with open(path, "rb") as file:
            return file.read()
    finally:
        if not readable:
            os.chmod(path, mode)
