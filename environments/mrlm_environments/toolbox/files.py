"""Files of an episode under one private root: read, write and list, and no way out of it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrlm_pl.environment.tools import Tool, ToolError, tool_schema
from mrlm_pl.episode import Task
from mrlm_pl.errors import DataError
from mrlm_pl.settings import at_least

MAX_PATH = 200
MAX_DEPTH = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe that another tool left in the root must not wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileSystem(Tool):
    """Text files in a temporary folder that is made for each episode and removed after it.

    The task's ``files``, a mapping from paths to contents, are there from the beginning. Paths are relative to the
    root; absolute ones, ``..`` and symbolic links are refused. Every step of a path is opened relative to the folder
    before it, without following links, so that nothing that another program does meanwhile leads out of the root.

    Args:
        max_bytes: largest size of a file.
        max_files: files and folders that may exist.

    Raises:
        ConfigurationError: a limit is below 1.
    """

    schema = tool_schema(
        "file_system",
        "Read or write a text file, or list a folder, by its relative path.",
        {"operation": {"enum": ["read", "write", "list"]}},
        {"path": {"type": "string"}, "content": {"type": "string"}},
    )

    _root: Path | None
    _remove: weakref.finalize[..., FileSystem] | None

    def __init__(self, max_bytes: int = 100_000, max_files: int = 100) -> None:
        at_least(1, "file_system: ", max_bytes=max_bytes, max_files=max_files)
        self.max_bytes, self.max_files = max_bytes, max_files
        self._forget()

    @property
    def root(self) -> Path | None:
        """The folder of the running episode, or None outside of one."""
        return self._root

    def open(self, task: Task) -> None:
        """Begin with a fresh root that holds the task's ``files``.

        Raises:
            DataError: a file of the task has a path or size that this tool would refuse.
        """
        self.close()
        self._root = Path(tempfile.mkdtemp(prefix="mrlm-files-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        for path, content in (task.data.get("files") or {}).items():
            try:
                self.write(path, content)
            except ToolError as error:
                raise DataError(f"task {task.key}, file {path!r:.80}: {error}; change the task's `files`") from error

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the file's content, a note of what was written, or one name a line; see :meth:`Tool.call`."""
        operation, path = arguments["operation"], arguments.get("path", "")
        if operation == "list":
            return "\n".join(self.names(path)) or "(empty)"
        if operation == "read":
            return self.read(path)
        if "content" not in arguments:
            raise ToolError("write needs a content")
        self.write(path, arguments["content"])
        return f"wrote {len(arguments['content'])} characters"

    def close(self) -> None:
        """Remove the root and all in it."""
        if self._remove is not None:
            self._remove()
        self._forget()

    def read(self, path: str) -> str:
        """Content of a file, with bytes that are no UTF-8 replaced.

        Raises:
            ToolError: there is no such file, the path leads out of the root, or the file is too large.
        """
        folders, name = self._place(path)
        with self._folder(folders, path) as folder, folder.opened(name, os.O_RDONLY, path) as handle:
            raw = handle.read(self.max_bytes + 1)
        if len(raw) > self.max_bytes:
            raise ToolError(f"{path} is larger than {self.max_bytes} bytes")
        return raw.decode("utf-8", errors="replace")

    def write(self, path: str, content: str) -> None:
        """Write a file, in place of an earlier one; folders are made.

        Raises:
            ToolError: the path leads out of the root, or the file or the number of files is too large.
        """
        raw = content.encode("utf-8", errors="replace")
        if len(raw) > self.max_bytes:
            raise ToolError(f"the content has {len(raw)} bytes; {self.max_bytes} are the most")
        folders, name = self._place(path)
        # A path may make as many entries as it has parts: counted as if none of them existed.
        if self._count() + len(folders) + 1 > self.max_files and not self._exists(folders, name, path):
            raise ToolError(f"there may be {self.max_files} files and folders at most")
        with self._folder(folders, path, make=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with folder.opened(name, flags, path) as handle:
                handle.write(raw)

    def names(self, path: str = "") -> list[str]:
        """Return names in a folder, sorted; those of folders end in a slash.

        Raises:
            ToolError: there is no such folder, or the path leads out of the root.
        """
        with self._folder(self._parts(path) if path else [], path) as folder, os.scandir(folder.handle) as entries:
            found = [f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in entries]
        return sorted(found)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the settings and no root: two instances must not share one.
        return {"max_bytes": self.max_bytes, "max_files": self.max_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._root, self._remove = None, None

    def _place(self, path: str) -> tuple[list[str], str]:
        """Return the folders and the name of a file's path."""
        parts = self._parts(path)
        if not parts:
            raise ToolError(f"{path!a} is not a file")
        return parts[:-1], parts[-1]

    def _parts(self, path: str) -> list[str]:
        if len(path) > MAX_PATH:
            raise ToolError(f"the path has {len(path)} characters; {MAX_PATH} are the most")
        if not path.isprintable():
            raise ToolError(f"{path!a} holds characters that are not allowed")
        if path.startswith(("/", "\\", "~")) or ":" in path:
            raise ToolError(f"{path!a} is not a relative path")
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ToolError(f"{path!a} leads out of the root: '..' is refused")
        if len(parts) > MAX_DEPTH:
            raise ToolError(f"{path!a} is {len(parts)} levels deep; {MAX_DEPTH} are the most")
        return parts

    def _folder(self, parts: list[str], path: str, *, make: bool = False) -> _Folder:
        if self._root is None:
            raise ToolError("no episode is running")
        folder = _Folder(os.open(self._root, _FOLDER))
        for part in parts:
            folder = folder.entered(part, path, make)
        return folder

    def _exists(self, folders: list[str], name: str, path: str) -> bool:
        try:
            with self._folder(folders, path) as folder, folder.opened(name, os.O_RDONLY, path):
                return True
        except ToolError:
            return False

    def _count(self) -> int:
        if self._root is None:
            return 0
        return sum(len(folders) + len(files) for _, folders, files in os.walk(self._root))


class _Folder:
    """An open folder; a context manager that closes it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def entered(self, name: str, path: str, make: bool) -> _Folder:
        """Return the folder ``name`` in this one, which is closed."""
        with self:
            try:
                if make and name not in os.listdir(self.handle):
                    os.mkdir(name, dir_fd=self.handle)
                return _Folder(os.open(name, _FOLDER, dir_fd=self.handle))
            except OSError as error:
                raise _refusal(path, error) from None

    def opened(self, name: str, flags: int, path: str) -> Any:
        """Return a regular file of this folder as a binary file object."""
        try:
            handle = os.open(name, flags | _FILE, 0o600, dir_fd=self.handle)
        except OSError as error:
            raise _refusal(path, error) from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ToolError(f"{path!a} is not a file")
        return os.fdopen(handle, "wb" if flags & os.O_WRONLY else "rb")


def _refusal(path: str, error: OSError) -> ToolError:
    reasons = {
        FileNotFoundError: "does not exist",
        NotADirectoryError: "is not a folder",
        IsADirectoryError: "is a folder",
        FileExistsError: "exists already",
        PermissionError: "may not be opened",
    }
    return ToolError(f"{path!a} {reasons.get(type(error), 'cannot be opened; links are refused')}")
