"""Folders that hostile code has filled go away, and nothing else does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrlm_pl.sandbox.removal import MAX_COUNTED, MAX_DEPTH, remove_tree, tree_size

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of an ordinary user, also where the tests run as root, whom no mode stops."""
    place = Path(tempfile.mkdtemp(prefix="mrlm-removal-"))
    place.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        (place / "tree").mkdir()
        yield place / "tree"
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(place)


def make_deep(folder: Path, depth: int) -> None:
    """Folders in each other, deeper than any path may be long."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a" * 40, dir_fd=place)
        inner = os.open("a" * 40, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


def test_a_plain_tree_is_removed(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").write_text("x")
    (folder / "a" / "b" / "file").write_text("x")
    os.mkfifo(folder / "a" / "pipe")
    remove_tree(str(folder))
    assert not folder.exists()


def test_a_folder_that_is_not_there_needs_no_removal(folder: Path) -> None:
    remove_tree(str(folder / "missing"))
    assert folder.exists()


def test_a_tree_of_any_depth_is_removed(folder: Path) -> None:
    make_deep(folder, 1500)
    remove_tree(str(folder))
    assert not folder.exists()


def test_folders_that_are_closed_are_removed(folder: Path) -> None:
    inner = folder / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    for place in (inner, inner.parent, folder):
        place.chmod(0)
    remove_tree(str(folder))
    assert not folder.exists()


def test_names_that_are_no_text_are_removed(folder: Path) -> None:
    (folder / "a").mkdir()
    for name in (b"\xff\xfe", b"-rf", b"\n"):
        os.mkdir(os.fsencode(folder / "a") + b"/" + name)
    remove_tree(str(folder))
    assert not folder.exists()


def test_names_that_entries_are_moved_to_cannot_be_taken(folder: Path) -> None:
    for number in range(20):
        (folder / f".moved-{number}" / "inner").mkdir(parents=True)
        (folder / f".moved-{number}" / "file").write_text("x")
    remove_tree(str(folder))
    assert not folder.exists()


def test_links_are_removed_and_not_followed(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    outside.chmod(0o555)
    (folder / "a").mkdir()
    (folder / "to-a-folder").symlink_to(outside)
    (folder / "a" / "to-a-file").symlink_to(outside / "kept")
    (folder / "nowhere").symlink_to("missing")
    remove_tree(str(folder))
    assert not folder.exists()
    assert (outside / "kept").read_text() == "x"
    assert outside.stat().st_mode & 0o777 == 0o555


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (folder / "link").symlink_to(outside)
    with pytest.raises(OSError, match=r"link"):
        remove_tree(str(folder / "link"))
    assert (outside / "kept").exists()


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
    make_deep(folder, MAX_DEPTH + 2)
    assert tree_size(str(folder))[1] == MAX_COUNTED
    assert tree_size(str(folder / "missing")) == (0, 0)
