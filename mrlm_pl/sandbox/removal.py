"""Removes a folder that hostile code has filled, and tells how much it holds."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

MAX_COUNTED = 20_000
MAX_DEPTH = 64


def remove_tree(path: str) -> None:
    """Remove a folder and all below it, whatever its depth, modes and links; links are not followed.

    Every sub-folder is emptied by moving its entries up into the top, so neither recursion nor long paths occur.

    Raises:
        OSError: something in it cannot be removed.
    """
    try:
        place = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        top = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
    finally:
        os.close(place)
    fresh, moved = f".{secrets.token_hex(8)}-", 0  # names that nothing in it can have
    try:
        while entries := _entries(top):
            for name, is_folder in entries:
                if not is_folder:
                    os.unlink(name, dir_fd=top)
                    continue
                _open_up(name, top)
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for inner, inner_is_folder in _entries(folder):
                        if inner_is_folder:
                            _open_up(inner, folder)  # a folder is renamed by who may write it
                        moved += 1
                        os.rename(inner, f"{fresh}{moved}", src_dir_fd=folder, dst_dir_fd=top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def tree_size(path: str) -> tuple[int, int]:
    """Bytes on disk and number of files below a folder.

    Counting stops at ``MAX_COUNTED`` files, which a tree of more than ``MAX_DEPTH`` folders in each other counts as.
    """
    size = count = 0
    waiting = [(path, 0)]
    while waiting and count < MAX_COUNTED:
        folder, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return size, MAX_COUNTED
        with suppress(OSError), os.scandir(folder) as entries:  # it may vanish, or be closed to us
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
                else:
                    with suppress(OSError):  # as above
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                if count >= MAX_COUNTED:
                    break
    return size, count


def _entries(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as found:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]


def _open_up(name: str, folder: int) -> None:
    with suppress(OSError):  # then opening it says why
        os.chmod(name, 0o700, dir_fd=folder)
