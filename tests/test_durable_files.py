"""Atomic replacement of files."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.durable_files import check_writable, replacing, write_json


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_no_draft(
    tmp_path: Path, durable: bool, error: BaseException
) -> None:
    path = tmp_path / "deep" / "report.json"
    with replacing(path, durable=durable) as draft:
        draft.write_text("old")

    def fail() -> None:
        with replacing(path, durable=durable) as draft:
            draft.write_text("half of the n")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_text() == "old"
    assert [item.name for item in path.parent.iterdir()] == ["report.json"]


def test_the_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    (tmp_path / "report.json.part").write_text("of a writer that was killed, and longer than the new one")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_json_has_no_infinities(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"ci95": (-math.inf, 1.0), "mean": [math.nan]})
    assert json.loads(path.read_text()) == {"ci95": [None, 1.0], "mean": [None]}
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"ci95": [None, 1.0], "mean": [None]}


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.json'"):
        write_json(tmp_path / "report.json", {})


def test_a_device_or_a_pipe_is_written_and_never_replaced(tmp_path: Path) -> None:
    """Renamed to /dev/null, a report of root would take the device's place."""
    pipe = tmp_path / "report.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable("output", pipe)
        write_json(pipe, {"reward": 1})
        assert json.loads(os.read(reader, 1000)) == {"reward": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_link_to_a_file_descriptor_as_dev_stdout_is_never_replaced(tmp_path: Path) -> None:
    with (tmp_path / "redirected").open("w") as file:
        output = tmp_path / "stdout"
        output.symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_json(output, {"reward": 1})
        assert output.is_symlink()
    assert json.loads((tmp_path / "redirected").read_text()) == {"reward": 1}
