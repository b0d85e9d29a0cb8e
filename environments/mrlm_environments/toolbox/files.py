"""Files of an episode, in memory: read, write and list. No path of them leads to a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlm_pl.environment.tools import Tool, ToolError, tool_schema
from mrlm_pl.episode import Task
from mrlm_pl.errors import DataError
from mrlm_pl.settings import at_least

MAX_PATH = 200
MAX_DEPTH = 8


class FileSystem(Tool):
    """Text files that live in memory for one episode.

    The task's ``files``, a mapping from paths to contents, are there from the beginning. Paths are relative to the
    root; absolute ones and ``..`` are refused.

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

    def __init__(self, max_bytes: int = 100_000, max_files: int = 100) -> None:
        at_least(1, "file_system: ", max_bytes=max_bytes, max_files=max_files)
        self.max_bytes, self.max_files = max_bytes, max_files
        self._files: dict[tuple[str, ...], str] = {}

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
        name = _file_parts(path)
        files, folders = self._entered(name[:-1], path)
        if name not in files:
            raise ToolError(f"{path!a} {'is not a file' if name in folders else 'does not exist'}")
        return files[name]

    def write(self, path: str, content: str) -> None:
        """Write a file, in place of an earlier one, and make its folders.

        Raises:
            ToolError: the path is refused, or the file or the number of files is too large.
        """
        raw = content.encode("utf-8", errors="replace")
        if len(raw) > self.max_bytes:
            raise ToolError(f"the content has {len(raw)} bytes; {self.max_bytes} are the most")
        name = _file_parts(path)
        files, folders = self._entered((), path)
        # A path may make as many entries as it has parts: counted as if none of them existed.
        if len(files) + len(folders) + len(name) > self.max_files and name not in files:
            raise ToolError(f"there may be {self.max_files} files and folders at most")
        if any(name[:depth] in files for depth in range(1, len(name))):
            raise ToolError(f"{path!a} is not a folder")
        if name in folders:
            raise ToolError(f"{path!a} is a folder")
        files[name] = raw.decode()

    def names(self, path: str = "") -> list[str]:
        """Return the sorted names in a folder; those of folders end in a slash.

        Raises:
            ToolError: there is no such folder.
        """
        above = _parts(path)
        files, folders = self._entered(above, path)
        found = [name[-1] for name in files if name[:-1] == above]
        return sorted([*found, *(f"{name[-1]}/" for name in folders if name[:-1] == above)])

    def _entered(self, folder: tuple[str, ...], path: str) -> tuple[dict[tuple[str, ...], str], set[tuple[str, ...]]]:
        """Return all files and folders, after a check that a folder exists."""
        folders = {name[:depth] for name in self._files for depth in range(1, len(name))}
        for depth in range(1, len(folder) + 1):
            if folder[:depth] not in folders:
                fault = "is not a folder" if folder[:depth] in self._files else "does not exist"
                raise ToolError(f"{path!a} {fault}")
        return self._files, folders


def _file_parts(path: str) -> tuple[str, ...]:
    parts = _parts(path)
    if not parts:
        raise ToolError(f"{path!a} is not a file")
    return parts


def _parts(path: str) -> tuple[str, ...]:
    if len(path) > MAX_PATH:
        raise ToolError(f"the path has {len(path)} characters; {MAX_PATH} are the most")
    if not path.isprintable():
        raise ToolError(f"{path!a} holds characters that are not allowed")
    if path.startswith(("/", "\\", "~")) or ":" in path:
        raise ToolError(f"{path!a} is not a relative path")
    parts = tuple(part for part in path.replace("\\", "/").split("/") if part not in ("", "."))
    if ".." in parts:
        raise ToolError(f"{path!a} leads out of the root: '..' is refused")
    if len(parts) > MAX_DEPTH:
        raise ToolError(f"{path!a} is {len(parts)} levels deep; {MAX_DEPTH} are the most")
    return parts
