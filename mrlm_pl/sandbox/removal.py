"""Removes a folder that hostile code has filled."""

from __future__ import annotations

import os
from contextlib import suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_tree(path: str) -> None:
    """Remove a folder and all below it, for any depth, modes and links; links are not followed.

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
        subfolders = _remove_files(folder)
        while subfolders or above:
            if subfolders:
                name, parent = subfolders.pop(), _identity(folder)
                next_folder = open_folder(name, folder)
                above.append((name, parent, subfolders))
                subfolders = _remove_files(next_folder)
            else:
                name, parent, subfolders = above.pop()
                next_folder = os.open("..", _FOLDER, dir_fd=folder)
                if _identity(next_folder) != parent:
                    os.close(next_folder)
                    raise OSError(f"the folder {name!r} below {path} was moved while it was removed")
                os.rmdir(name, dir_fd=next_folder)
            os.close(folder)
            folder = next_folder
    finally:
        os.close(folder)
    os.rmdir(path)


def open_folder(name: str, above: int | None = None) -> int:
    """Return a descriptor of a folder that its owner may have closed to readers, even to itself; a link is rejected.

    Args:
        name: name in the folder ``above``, or a path.
        above: descriptor of a folder.

    Raises:
        OSError: the path is not a folder, or belongs to another user.
    """
    with suppress(PermissionError):
        return os.open(name, _FOLDER, dir_fd=above)
    path_descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{path_descriptor}", 0o700)
        return os.open(".", _FOLDER, dir_fd=path_descriptor)
    finally:
        os.close(path_descriptor)


def _remove_files(folder: int) -> list[str]:
    """Return names of the folders in a folder, after all else was removed from it."""
    os.fchmod(folder, 0o700)  # it may be readable and not writable
    with os.scandir(folder) as listing:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing]
    for name, is_folder in entries:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
