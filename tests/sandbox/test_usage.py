"""The resources of a cell: every file on the disk is counted, with and without a name, wherever it hides."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import threading
from pathlib import Path

import pytest

from mrlm_pl.sandbox.host.usage import (
    MAX_COUNTED,
    MAX_DEPTH,
    DiskUse,
    process_states,
    process_tree,
    resident_bytes,
    tree_size,
    unnamed_mapped_inodes,
    unnamed_open_files,
)

MEBIBYTE = 1 << 20
# Random digits: a file system that compresses must not make them smaller.
BLOCK = os.urandom(MEBIBYTE)


def nameless(place: Path) -> int:
    """Return a descriptor of a file of one MiB that no folder holds."""
    number = os.open(place, os.O_CREAT | os.O_RDWR | os.O_EXCL)
    os.write(number, BLOCK)
    os.unlink(place)
    return number


def test_the_size_counts_blocks_and_entries(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "file").write_bytes(bytes(range(256)) * 4096)
    with open(folder / "hole", "wb") as file:
        file.truncate(1 << 30)
    (folder / "link").symlink_to("/usr")
    size, count = tree_size(str(folder))
    assert count == 4
    assert 1 << 20 <= size < (1 << 20) + 65_536, "a hole takes no room, and a link is not followed"


def test_counting_ends_in_a_tree_that_does_not(folder: Path) -> None:
    place = folder
    for _ in range(MAX_DEPTH + 2):
        place /= "a"
        place.mkdir()
    assert tree_size(str(folder))[1] == MAX_COUNTED
    assert tree_size(str(folder / "missing")) == (0, 0)


def long_names(folder: Path, depth: int) -> int:
    """Return a descriptor of the innermost of nested folders with long names."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 255, dir_fd=place)
        inner = os.open("d" * 255, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    return place


def test_files_below_names_that_make_no_path_are_counted(folder: Path) -> None:
    place = long_names(folder, 20)  # 5,100 characters, where a path has 4,096
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=place)
    os.write(file, BLOCK)
    os.close(file)
    os.close(place)
    size, count = tree_size(str(folder))
    assert count == 21
    assert size >= MEBIBYTE


def test_endless_folders_with_long_names_are_too_many(folder: Path) -> None:
    os.close(long_names(folder, MAX_DEPTH + 2))
    assert tree_size(str(folder))[1] == MAX_COUNTED


def test_files_in_a_folder_that_is_closed_to_readers_are_counted(folder: Path) -> None:
    (folder / "closed").mkdir(0o300)
    (folder / "closed" / "file").write_bytes(BLOCK)
    size, count = tree_size(str(folder))
    assert count == 2
    assert size >= MEBIBYTE


def test_open_files_without_a_name_are_counted_once(folder: Path) -> None:
    file = nameless(folder / "file")
    second = os.dup(file)
    key = os.fstat(file).st_dev, os.fstat(file).st_ino
    assert MEBIBYTE <= unnamed_open_files(os.getpid())[key] < 2 * MEBIBYTE
    os.close(file)
    os.close(second)
    assert key not in unnamed_open_files(os.getpid())


def test_descriptors_of_a_thread_whose_table_is_its_own_are_seen(folder: Path) -> None:
    libc, ready, done = ctypes.CDLL(None, use_errno=True), threading.Event(), threading.Event()
    found: list[int] = []

    def keep() -> None:
        assert libc.unshare(0x400) == 0  # CLONE_FILES
        file = nameless(folder / "file")
        found.append(os.fstat(file).st_ino)
        ready.set()
        done.wait(60)
        os.close(file)

    thread = threading.Thread(target=keep)
    thread.start()
    assert ready.wait(60)
    inodes = {inode for _, inode in unnamed_open_files(os.getpid())}
    done.set()
    thread.join()
    assert found[0] in inodes


def test_a_mapped_file_without_a_name_counts_as_much_as_is_allowed(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    use, whole = DiskUse(str(folder), 7 * MEBIBYTE), 7 * MEBIBYTE
    file = nameless(folder / "file")
    inode = os.fstat(file).st_ino
    place = ctypes.c_void_p(libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0)))
    before = use.measure([os.getpid()])[0]
    os.close(file)
    assert unnamed_mapped_inodes(os.getpid(), str(folder)) == {inode}
    once, twice = use.measure([os.getpid()])[0], use.measure([os.getpid()])[0]
    libc.munmap(place, 4096)
    assert before >= MEBIBYTE, "its size is known while it is open"
    assert once < before, "it may be about to be closed"
    assert twice - once == whole
    assert use.measure([os.getpid()])[0] == once


def test_a_name_that_claims_to_be_removed_is_a_name(folder: Path) -> None:
    with open(folder / "file (deleted)", "wb+") as file:
        file.write(BLOCK)
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert unnamed_mapped_inodes(os.getpid(), str(folder)) == set()
            inode = os.fstat(file.fileno()).st_ino
            (folder / "file (deleted)").unlink()
            (folder / "file (deleted) (deleted)").write_bytes(b"a name that the removed file is shown by")
            assert unnamed_mapped_inodes(os.getpid(), str(folder)) == {inode}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_a_process_that_cannot_be_looked_into_counts_as_much_as_is_allowed(folder: Path) -> None:
    use = DiskUse(str(folder), 7 * MEBIBYTE)  # the fixture is an ordinary user, and process 1 is root's
    assert use.measure([1])[0] < MEBIBYTE
    assert use.measure([1])[0] >= 7 * MEBIBYTE
    assert use.measure([])[0] < MEBIBYTE


def test_a_process_that_is_gone_uses_nothing(folder: Path) -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert resident_bytes(process.pid) == 0
    assert list(process_tree(process.pid)) == [process.pid]
    use = DiskUse(str(folder), MEBIBYTE)
    assert use.measure([process.pid]) == use.measure([process.pid]) == (0, 0)


def test_a_process_may_give_itself_a_name_that_is_no_text() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes(b"\xff) Z")
        assert process_states(os.getpid())[os.getpid()] in "RSD"
    finally:
        name.write_bytes(before)
