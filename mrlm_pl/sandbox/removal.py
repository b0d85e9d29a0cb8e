"""Removes a folder that hostile code has filled."""

from __future__ import annotations

import os
from contextlib import suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_tree(path: str) -> None:
    """Remove a folder and all below it, whatever its depth, modes and links; links are not followed.

    Goes down by names and up by ``..``, one folder at a time: neither recursion, nor long paths, nor many descriptors.

    Raises:
        OSError: something in it cannot be removed, or was moved meanwhile.
    """
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return
    try:
        above: list[tuple[str, tuple[int, int], list[str]]] = []  # a folder's name, its parent, and its siblings
        left = _without_files(folder)
        while left or above:
            if left:
                name, holder = left.pop(), _identity(folder)
                inner = open_folder(name, folder)
                above.append((name, holder, left))
                left = _without_files(inner)
            else:
                name, holder, left = above.pop()
                inner = os.open("..", _FOLDER, dir_fd=folder)
                if _identity(inner) != holder:
                    os.close(inner)
                    raise OSError(f"the folder {name!r} below {path} was moved while it was removed")
                os.rmdir(name, dir_fd=inner)
            os.close(folder)
            folder = inner
    finally:
        os.close(folder)
    os.rmdir(path)


def open_folder(name: str, above: int | None = None) -> int:
    """Return a descriptor of a folder that its owner may have closed to readers, even to itself; a link is refused.

    Args:
        name: in the folder ``above``, or a path.
        above: a descriptor.

    Raises:
        OSError: it is no folder, or belongs to somebody else.
    """
    with suppress(PermissionError):
        return os.open(name, _FOLDER, dir_fd=above)
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)


def _without_files(folder: int) -> list[str]:
    """Return names of the folders in a folder, after all else was removed from it."""
    os.fchmod(folder, 0o700)  # it may be readable and not writable
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino
