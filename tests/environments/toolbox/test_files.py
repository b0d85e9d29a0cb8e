from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
from mrlm_environments.toolbox.files import FileSystem

from mrlm_pl.environment.tools import ToolError
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError, DataError

TASK = Task("tools", "train", 0, data={"files": {"notes/a.txt": "one", "b.txt": "two"}})


@pytest.fixture
def files() -> Iterator[FileSystem]:
    tool = FileSystem(max_bytes=1000, max_files=10)
    tool.open(TASK)
    yield tool
    tool.close()


def test_the_files_of_the_task_are_read_written_and_listed(files: FileSystem) -> None:
    assert files.call({"operation": "list"}) == "b.txt\nnotes/"
    assert files.call({"operation": "list", "path": "notes"}) == "a.txt"
    assert files.call({"operation": "read", "path": "notes/a.txt"}) == "one"
    assert "5" in files.call({"operation": "write", "path": "new/deep/c.txt", "content": "three"})
    assert files.call({"operation": "read", "path": "./new//deep/c.txt"}) == "three"
    files.call({"operation": "write", "path": "b.txt", "content": "half of a character: \ud800"})
    assert files.call({"operation": "read", "path": "b.txt"}) == "half of a character: ?"
    files.call({"operation": "write", "path": "b.txt", "content": ""})
    assert files.call({"operation": "read", "path": "b.txt"}) == ""


@pytest.mark.parametrize("operation", ["read", "write", "list"])
@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../b.txt",
        "notes/../../b.txt",
        "notes/../b.txt",
        "..\\b.txt",
        "/etc/passwd",
        "//etc/passwd",
        "~/b.txt",
        "C:\\b.txt",
        "b\x00.txt",
        "\ud800.txt",
        "x" * 300,
        "a/" * 20 + "b",
    ],
)
def test_paths_out_of_the_root_are_refused(files: FileSystem, operation: str, path: str) -> None:
    with pytest.raises(ToolError):
        files.call({"operation": operation, "path": path, "content": "x"})
    assert files.names() == ["b.txt", "notes/"]


def test_folders_and_paths_below_files_are_refused(files: FileSystem) -> None:
    for operation in ("read", "write"):
        for path in ("notes", ".", "", "b.txt/c.txt", "absent/c.txt" if operation == "read" else "b.txt/d"):
            with pytest.raises(ToolError):
                files.call({"operation": operation, "path": path, "content": "x"})
    with pytest.raises(ToolError, match="content"):
        files.call({"operation": "write", "path": "c.txt"})


def test_sizes_and_number_of_files_are_bounded(files: FileSystem) -> None:
    with pytest.raises(ToolError, match="1000"):
        files.write("big.txt", "x" * 1001)
    with pytest.raises(ToolError, match="1000"):
        files.write("big.txt", "é" * 501)
    files.write("b.txt", "x" * 1000)
    for number in range(7):  # three entries are the task's
        files.write(f"{number}.txt", "x")
    with pytest.raises(ToolError, match="10 files"):
        files.write("one-more.txt", "x")
    with pytest.raises(ToolError, match="10 files"):
        files.write("folder/one-more.txt", "x")
    files.write("b.txt", "again")
    assert files.read("b.txt") == "again"


def test_every_episode_and_every_copy_has_its_own_files(files: FileSystem) -> None:
    files.write("mine.txt", "x")
    for other in (copy.deepcopy(files), pickle.loads(pickle.dumps(files))):
        other.write("its.txt", "x")
        assert "its.txt" not in files.names()
        assert (other.max_bytes, other.max_files) == (1000, 10)
        other.open(TASK)
        assert "mine.txt" not in other.names()
        other.close()
    assert "mine.txt" in files.names()
    files.open(TASK)
    assert "mine.txt" not in files.names()
    files.close()
    files.close()
    assert files.names() == []


def test_wrong_settings_and_tasks_are_named() -> None:
    with pytest.raises(ConfigurationError, match="max_files is 0;"):
        FileSystem(max_files=0)
    tool = FileSystem()
    with pytest.raises(DataError, match=r"\.\./a"):
        tool.open(Task("tools", "train", 0, data={"files": {"../a": "x"}}))
    tool.close()
