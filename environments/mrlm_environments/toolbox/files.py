"""Files of an episode, in memory: read, write and list. No path of them leads to a disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from mrlm_pl.environment.tools import Tool, ToolError, tool_schema
from mrlm_pl.episode import Task
from mrlm_pl.errors import DataError
from mrlm_pl.settings import PositiveInt

MAX_PATH = 200
MAX_DEPTH = 8


class FileSystem(Tool):
    """Text files that live in memory for one episode.

    The task's ``files``, a mapping from paths to contents, are there from the beginning. Paths are relative to the
    root; absolute ones and ``..`` are rejected.

    Args:
        max_bytes: largest size of a file.
        max_files: largest number of files and folders.

    Raises:
        ConfigurationError: a limit is below 1.
    """

    schema = tool_schema(
        "file_system",
        "Read or write a text file, or list a folder, by its relative path.",
        {"operation": {"enum": ["read", "write", "list"]}},
        {"path": {"type": "string"}, "content": {"type": "string"}},
    )

    def __init__(self, max_bytes: PositiveInt = 100_000, max_files: PositiveInt = 100) -> None:
        self.max_bytes, self.max_files = max_bytes, max_files
        self._files: dict[PurePosixPath, str] = {}

    def open(self, task: Task) -> None:
        """Begin with the task's ``files`` alone.

        Raises:
            DataError: a file of the task has a path or size that this tool would refuse.
        """
        self._files = {}
        for path, content in (task.data.get("files") or {}).items():
            try:
                self.write(path, content)
            except ToolError as error:
                raise DataError(f"task {task.key}, file {path!r:.80}: {error}; change the task's `files`") from error

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the file's content, a note of the written size, or one name a line; see :meth:`Tool.call`."""
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
        """Forget the files."""
        self._files = {}

    def read(self, path: str) -> str:
        """Return the content of a file.

        Raises:
            ToolError: there is no such file.
        """
        name = _relative(path)
        if name not in self._files:
            raise ToolError(f"{path!a} {'is not a file' if name in self._folders() else 'does not exist'}")
        return self._files[name]

    def write(self, path: str, content: str) -> None:
        """Write a file, replacing an earlier one, and create its folders.

        Raises:
            ToolError: the path is rejected, or the file or the number of files is too large.
        """
        raw = content.encode("utf-8", errors="replace")
        if len(raw) > self.max_bytes:
            raise ToolError(f"the content has {len(raw)} bytes; {self.max_bytes} are the most")
        name, folders = _relative(path), self._folders()
        # A path may make as many entries as it has parts: counted as if none of them existed. The root is no entry.
        if len(self._files) + len(folders) - 1 + len(name.parts) > self.max_files and name not in self._files:
            raise ToolError(f"there may be {self.max_files} files and folders at most")
        if name in folders or not self._files.keys().isdisjoint(name.parents):
            raise ToolError(f"{path!a} is {'a folder' if name in folders else 'in a file, not in a folder'}")
        self._files[name] = raw.decode()

    def names(self, path: str = "") -> list[str]:
        """Return the sorted names in a folder; those of folders end in a slash.

        Raises:
            ToolError: there is no such folder.
        """
        above, folders = _relative(path), self._folders()
        if above not in folders:
            raise ToolError(f"{path!a} {'is not a folder' if above in self._files else 'does not exist'}")
        found = [name.name for name in self._files if name.parent == above]
        return sorted([*found, *(f"{folder.name}/" for folder in folders if folder.name and folder.parent == above)])

    def _folders(self) -> set[PurePosixPath]:
        """Return the root and the folders of all files."""
        return {PurePosixPath(), *(folder for name in self._files for folder in name.parents)}


def _relative(path: str) -> PurePosixPath:
    name = PurePosixPath(path.replace("\\", "/"))
    leads_out = name.is_absolute() or path.startswith("~") or ":" in path or ".." in name.parts
    if leads_out or not path.isprintable() or len(path) > MAX_PATH or len(name.parts) > MAX_DEPTH:
        raise ToolError(
            f"{path[:MAX_PATH]!a} is refused: give a relative path without '..', '~' and ':', of {MAX_DEPTH} levels "
            f"and {MAX_PATH} printable characters at most"
        )
    return name
