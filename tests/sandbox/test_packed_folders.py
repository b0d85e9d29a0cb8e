"""Folders of a system that are packed in one place and unpacked in another."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mrlm_pl.sandbox import Sandbox
from mrlm_pl.sandbox.inside import files
from mrlm_pl.sandbox.inside.files import pack, unpack

SHOW = "cd ~; find . /tmp /srv -printf '%p %y %m %s %T@ %l\\n' | sort; cat closed a/data | md5sum; chmod 0 closed"


def fill(folder: Path) -> None:
    (folder / "a" / "inner").mkdir(parents=True)
    (folder / "a" / "data").write_bytes(bytes(range(256)))
    (folder / "closed").write_text("x")
    os.symlink("../nowhere", folder / "link")
    os.mkfifo(folder / "pipe")
    (folder / "closed").chmod(0o400)
    os.utime(folder / "a" / "data", ns=(1, 2_000_000_003))
    os.utime(folder / "a", ns=(4, 5_000_000_006))
    (folder / "a" / "inner").chmod(0o500)


def seen(folder: Path) -> list[tuple[str, int, int, str]]:
    found = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes().hex() if path.is_file() else ""
        time = 0 if path.is_symlink() else status.st_mtime_ns
        found.append((str(path.relative_to(folder)), stat.S_IFMT(status.st_mode), status.st_mode & 0o777, content))
        found.append((str(time), 0, 0, ""))
    return found


def test_folders_hold_what_was_packed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill(root)
    before = seen(root)
    text = pack(str(root))
    assert seen(root) == before, "packing changes nothing"
    (root / "a" / "inner").chmod(0o700)
    (root / "a" / "inner" / "more").write_text("y")
    (root / "a" / "data").unlink()
    (root / "link").unlink()
    (root / "link").mkdir()
    unpack(str(root), text)
    assert seen(root) == before


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_PACKED_BYTES", 100)
    (tmp_path / "small").write_bytes(b"x" * 100)
    pack(str(tmp_path))
    (tmp_path / "small").write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        pack(str(tmp_path))


def test_a_system_is_copied_for_a_user_without_rights() -> None:
    sandbox = Sandbox()
    if sandbox.isolation != "namespaces":
        pytest.skip("a separate system needs namespaces")
    with sandbox.open(shell=True) as source, sandbox.open(shell=True) as target:
        script = "cd ~; mkdir -p a/b; echo x > closed; seq 9 > a/data; ln -s a link; mkfifo pipe; chmod 0 a/b closed"
        sandbox.script(source, f"{script}; touch -d 2001-02-03 a; echo y > /tmp/t; chmod 500 /srv")
        sandbox.script(target, "echo other > ~/other; mkdir /srv/gone; chmod 0 /srv/gone")
        assert sandbox.copy_files(source, target)
        shown = [sandbox.script(cell, f"chmod 400 ~/closed; {SHOW}").output for cell in (source, target)]
    assert shown[0] == shown[1]
    assert "./closed f 400 2" in shown[0]
    assert "./a d 755" in shown[0]
