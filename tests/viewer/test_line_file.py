"""Lines of growing, compressed, truncated and huge files."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from mrlm_pl import compressed_files
from mrlm_pl.compressed_files import packed
from mrlm_pl.viewer import line_file
from mrlm_pl.viewer.line_file import LineFile


def lines(file: LineFile) -> list[tuple[int, bytes]]:
    return [item for item in file.new_lines() if item is not None]


def random_lines(count: int) -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(rng.randrange(1, 2000)).hex().encode() for _ in range(count)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_each_line_is_found_again_by_its_offset(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "CHUNK", 1000)
    monkeypatch.setattr(compressed_files, "FED", 3000)
    monkeypatch.setattr(compressed_files, "FRAME", 10_000)
    monkeypatch.setattr(line_file, "POINTS_APART", 20_000)
    written = random_lines(300)
    text = b"\n".join(written) + b"\n"
    path = tmp_path / name
    path.write_bytes(packed(path, text))
    file = LineFile(path)
    found = lines(file)
    assert [line for _, line in found] == written
    assert [offset for offset, _ in found] == [sum(len(line) + 1 for line in written[:n]) for n in range(300)]
    assert len(file._points) > len(text) / 50_000
    for offset, line in random.Random(1).sample(found, 50):
        assert file.line(offset) == line


def test_a_growing_file_gives_complete_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntw")
    file = LineFile(path)
    assert lines(file) == [(0, b"one")]
    assert file.truncated
    with path.open("ab") as end:
        end.write(b"o\nthree\n")
    assert lines(file) == [(4, b"two"), (8, b"three")]
    assert not file.truncated
    assert lines(file) == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_appended_members_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(packed(path, b"one\n"))
    file = LineFile(path)
    assert lines(file) == [(0, b"one")]
    with path.open("ab") as end:
        end.write(packed(path, b"two\n"))
    assert lines(file) == [(4, b"two")]
    assert file.line(4) == b"two"


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b"
    path.write_bytes(b"one\n")
    file = LineFile(path)
    lines(file)
    other.write_bytes(b"uno\ndue\n")
    os.replace(other, path)
    assert list(file.new_lines()) == [None, (0, b"uno"), (4, b"due")]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_gives_its_complete_lines(name: str, tmp_path: Path) -> None:
    written = random_lines(500)
    path = tmp_path / name
    whole = packed(path, b"\n".join(written) + b"\n")
    path.write_bytes(whole[: len(whole) // 2])
    file = LineFile(path)
    found = [line for _, line in lines(file)]
    assert 180 < len(found) < 300
    assert found == written[: len(found)]
    assert file.truncated
    assert file.fault is None


def test_a_frame_that_ends_early_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(packed(path, b"one\n") + packed(path, b"two\n")[:-1])
    file = LineFile(path)
    assert lines(file)[0] == (0, b"one")
    assert file.truncated


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_damage_ends_the_file_with_a_reason(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(packed(path, b"one\n") + b"this is no compressed member")
    file = LineFile(path)
    assert lines(file) == [(0, b"one")]
    assert file.fault is not None


def test_a_line_above_the_limit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "LONGEST_LINE", 10)
    monkeypatch.setattr(line_file, "CHUNK", 4)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\n")
    file = LineFile(path)
    assert lines(file) == [(0, b"one"), (105, b"two")]
    assert file.skipped == 1


MEMORY = """
import sys
from pathlib import Path
from mrlm_pl.viewer.episode_index import EpisodeIndex
def peak():  # getrusage's may be that of the process which started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before = peak()
index = EpisodeIndex(lambda: [Path(sys.argv[1])], lambda: None)
table = index.table()
record = index.record(table["rows"][0][0]) if table["rows"] else None
print(len(table["rows"]), len(table["notes"]), (peak() - before) // 1024)
"""


def measured(path: Path) -> list[int]:
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("name", ["big.jsonl.gz", "big.jsonl.zst"])
@pytest.mark.parametrize("blocks", [8, pytest.param(68, marks=pytest.mark.slow)])  # an eighth of a gigabyte, a whole
def test_memory_stays_bounded_with_many_episodes(blocks: int, name: str, tmp_path: Path) -> None:
    from tests.support.runs.recorded_runs import episode

    text = episode("0-0", "word " * 20_000).to_json().encode() + b"\n"
    path = tmp_path / name
    block = packed(path, text * 80)  # of 16 MB
    path.write_bytes(block * blocks)
    assert len(text) * 80 * blocks > blocks / 68 * (1 << 30)
    rows, notes, megabytes = measured(path)
    assert (rows, notes) == (80 * blocks, 0)
    assert megabytes < 100


def zstandard_frame(text: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(text)


@pytest.mark.parametrize(("name", "compress"), [("line.jsonl.gz", gzip.compress), ("line.jsonl.zst", zstandard_frame)])
@pytest.mark.long
def test_memory_stays_bounded_with_a_line_of_a_gigabyte(
    name: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(compress(b"x" * (1 << 25)) * 32)
    rows, notes, megabytes = measured(path)
    assert (rows, notes) == (0, 1)
    assert megabytes < 400
