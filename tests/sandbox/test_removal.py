"""Folders that hostile code has filled go away, and nothing else does."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.sandbox.removal import remove_tree


def make_deep(folder: Path, depth: int, name: str = "a" * 40) -> None:
    """Folders in each other, deeper than any path may be long."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=place)
        inner = os.open(name, os.O_RDONLY, dir_fd=place)
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


def test_each_folder_is_opened_twice_and_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the names and the depth: the work grows with the number of folders alone."""
    calls: Counter[str] = Counter()
    for name in ("open", "scandir", "rename", "rmdir"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, _name=name, _real=real, **k: (calls.update([_name]), _real(*a, **k))[1]
        )
    for name, depth in (("a", 100), ("b" * 255, 400)):
        (folder / name).mkdir()
        make_deep(folder / name, depth, name)
        calls.clear()
        remove_tree(str(folder / name))
        assert calls == {"open": 2 * depth + 1, "scandir": depth + 1, "rmdir": depth + 1}


def test_a_folder_that_moves_away_while_it_is_removed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = folder / "kept"
    (folder / "tree" / "inner").mkdir(parents=True)
    (kept / "inner").mkdir(parents=True)
    real = os.scandir

    def moving(place: int) -> Any:
        if (folder / "tree" / "inner").exists() and os.fstat(place).st_ino == (folder / "tree" / "inner").stat().st_ino:
            (folder / "tree" / "inner").rename(kept / "moved")
        return real(place)

    monkeypatch.setattr(os, "scandir", moving)
    with pytest.raises(OSError, match="moved while it was removed"):
        remove_tree(str(folder / "tree"))
    assert sorted(os.listdir(kept)) == ["inner", "moved"]


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
