"""A cell's use of resources that no limit of the kernel bounds: memory of all its processes, and disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress

from mrlm_pl.sandbox.removal import open_folder

MAX_COUNTED = 20_000
MAX_DEPTH = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 512


def process_tree(process: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    pending = [process]
    while pending:
        current = pending.pop()
        yield current
        with suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{thread}/children") as file:
                    pending += map(int, file.read().split())


def process_states(process: int) -> dict[int, str]:
    """Return the state letter (``R`` running, ``D`` waiting for a disk, ``Z`` ended, ...) of a process's family."""
    letters = {}
    for member in process_tree(process):
        with suppress(OSError), open(f"/proc/{member}/stat", errors="replace") as file:  # it may name itself anything
            letters[member] = file.read().rpartition(")")[2].split()[0]
    return letters


def resident_bytes(process: int) -> int:
    """Return bytes of memory that are a process's own."""
    with suppress(OSError), open(f"/proc/{process}/statm") as file:
        _, pages, shared, *_ = map(int, file.read().split())
        return (pages - shared) * _PAGE
    return 0  # it ended meanwhile


class DiskUse:
    """Disk that a cell uses: files in its folder, and files without a name that its processes keep.

    Args:
        folder: folder of the cell.
        unknown_bytes: bytes that are counted for a file of unknown size.
    """

    def __init__(self, folder: str, unknown_bytes: int) -> None:
        self._folder, self._unknown_bytes = folder, unknown_bytes
        self._hidden: set[tuple[str, int]] = set()

    def measure(self, processes: Iterable[int]) -> tuple[int, int]:
        """Return bytes on disk, and number of files in the folder.

        Args:
            processes: processes of the cell.
        """
        size, files = tree_size(self._folder)
        unnamed_sizes: dict[tuple[int, int], int] = {}
        hidden: set[tuple[str, int]] = set()
        for process in processes:
            try:
                unnamed_sizes |= unnamed_open_files(process)
                mapped = unnamed_mapped_inodes(process, self._folder)
            except PermissionError:  # it made itself unreadable
                hidden.add(("process", process))
            except OSError:  # it ended meanwhile
                continue
            else:
                hidden |= {("file", inode) for inode in mapped - {inode for _, inode in unnamed_sizes}}
        # A file is mapped without being open for a moment while it is closed, and a process unreadable while it starts.
        lasting_hidden, self._hidden = hidden & self._hidden, hidden
        return size + sum(unnamed_sizes.values()) + self._unknown_bytes * len(lasting_hidden), files


def unnamed_open_files(process: int) -> dict[tuple[int, int], int]:
    """Return bytes on disk of the files that a process has open and that no folder holds, by device and inode.

    Raises:
        OSError: the process is gone, or may not be looked into.
    """
    sizes = {}
    for thread in os.listdir(f"/proc/{process}/task"):  # each may have its own descriptors
        descriptors = f"/proc/{process}/task/{thread}/fd"
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            for name in os.listdir(descriptors):
                with suppress(FileNotFoundError):  # closed meanwhile
                    file = os.stat(f"{descriptors}/{name}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                        sizes[file.st_dev, file.st_ino] = file.st_blocks * _BLOCK
    return sizes


def unnamed_mapped_inodes(process: int, folder: str) -> set[int]:
    """Return inodes of a folder's files that a process has in its memory and that have no name any more.

    Raises:
        OSError: the process is gone, or may not be looked into.
    """
    prefix = os.fsencode(folder) + b"/"
    suffix = b" (deleted)"
    inodes = set()
    with open(f"/proc/{process}/maps", "rb") as file:
        lines = [line for line in file if line.endswith(suffix + b"\n") and prefix in line]
    for line in lines:
        *_, inode, path = line.rstrip(b"\n").split(maxsplit=5)
        with suppress(OSError):  # else a name that ends so
            if os.lstat(path).st_ino == int(inode):
                continue
        inodes.add(int(inode))
    return inodes


def tree_size(path: str) -> tuple[int, int]:
    """Return bytes on disk and number of files below a folder.

    Counting stops at ``MAX_COUNTED`` files, which a tree of more than ``MAX_DEPTH`` folders in each other counts as.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it is gone, or not there yet
        return 0, 0
    return _size(top, 0)


def _size(folder: int, depth: int) -> tuple[int, int]:
    """Return bytes on disk and number of files below an open folder, and close it."""
    size = count = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                with suppress(OSError):  # it may vanish
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        if depth == MAX_DEPTH:
                            return size, MAX_COUNTED
                        inner_size, inner_count = _size(open_folder(entry.name, folder), depth + 1)
                        size, count = size + inner_size, count + inner_count
                if count >= MAX_COUNTED:
                    return size, MAX_COUNTED
    finally:
        os.close(folder)
    return size, count
