"""The attack suite: nothing gets through, nothing is harmed, and honest programs have full marks."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.toolbox.programs import PythonRepl

from mrlm_pl.episode import Task
from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Sandbox, strongest
from tests.support.attacks.bait import REPOSITORY, Bait
from tests.support.attacks.catalogue import ATTACKS, HONEST, RUN_TWICE, SHELL_ATTACKS, Attack
from tests.support.attacks.run import HONEST_SECONDS, WALL_SECONDS, run

SCRIPT = Path(__file__).parents[1] / "support" / "attacks" / "run.py"
MARGIN_SECONDS = 15
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
EVERYTHING = {attack.name for attack in (*ATTACKS, *SHELL_ATTACKS, *HONEST)}
# They read, write and connect as a user may, which mere limits let them do.
THROUGH_AT_LIMITS = {
    "reads_a_file_outside",
    "reads_etc_passwd",
    "tcp_to_the_host",
    "abstract_socket_of_the_host",
    "writes_a_file_outside",
    "shell_reads_outside",
    "shell_writes_outside",
}
OF_HARM = [attack for attack in ATTACKS if attack.kind != "faking"]


def held(found: dict[str, Any]) -> None:
    assert found["through"] == []
    assert found["harm"] == []
    assert found["refused"] == []
    assert found["attacks"] == len(ATTACKS) + len(SHELL_ATTACKS)
    assert found["slowest"] <= WALL_SECONDS + MARGIN_SECONDS


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may use."""
    folder = Path(tempfile.mkdtemp(prefix="mrlm-attacks-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def in_a_process(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.long
def test_nothing_gets_through_at_the_strongest_level(tmp_path: Path) -> None:
    found = run(tmp_path / "bait", Sandbox(wall_seconds=WALL_SECONDS))
    if found["level"] == "limits":
        pytest.skip(f"this machine offers limits only: {strongest()[1]}")
    held(found)


def test_some_attacks_get_through_where_only_limits_hold(open_folder: Path) -> None:
    sandbox = Sandbox(level="limits", wall_seconds=HONEST_SECONDS)  # they are to succeed, on a busy machine too
    found = run(open_folder / "bait", sandbox, left_out=EVERYTHING - THROUGH_AT_LIMITS)
    assert set(found["through"]) == THROUGH_AT_LIMITS
    assert found["level"] == "limits"
    assert any(line.startswith("connection to") for line in found["harm"])
    assert "changed or made or removed: written" in found["harm"]


def test_nothing_gets_through_by_landlock_alone(tmp_path: Path) -> None:
    try:
        found = run(tmp_path / "bait", Sandbox(level="landlock", wall_seconds=WALL_SECONDS))
    except SandboxError as refused:
        pytest.skip(str(refused))
    assert found["level"] == "landlock"
    held(found)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_nothing_gets_through_for_an_ordinary_user(level: str, open_folder: Path) -> None:
    command = _as_nobody()
    found = in_a_process([*command, SYSTEM_PYTHON, str(SCRIPT), str(open_folder / "bait"), level])
    assert found["level"] == level
    held(found)


@pytest.mark.slow
def test_nothing_gets_through_in_a_container_without_rights(open_folder: Path) -> None:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("there is no unshare, or no setpriv")
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    inner = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set -all --inh-caps -all "$@"'
    python = [sys.executable, str(SCRIPT), str(open_folder / "bait")]
    found = in_a_process(["unshare", "-Ur", "sh", "-c", inner, "sh", *python])
    assert found["level"] == "landlock", "user namespaces are off, so this is the strongest"
    held(found)


@pytest.mark.slow
def test_nothing_gets_through_the_python_tool(tmp_path: Path) -> None:
    task = Task("tools", "train", 0)
    with Bait(tmp_path / "bait") as bait:

        def answers(attack: Attack) -> bool:
            """Return whether the function of the program gives an answer after it attacked."""
            tool = PythonRepl(Sandbox(wall_seconds=WALL_SECONDS))
            told = []
            for _ in range(2 if attack.name in RUN_TWICE else 1):
                tool.open(task)
                tool.call({"code": bait.program(attack.source)})
                told.append(tool.call({"code": "print(add(2, 3))"}))
                tool.close()
            return any("5" in text.splitlines() for text in told)

        with ThreadPoolExecutor(4) as pool:
            through = {attack.name for attack, done in zip(OF_HARM, pool.map(answers, OF_HARM), strict=True) if done}
        assert bait.harm() == []
    assert not through


def _as_nobody() -> list[str]:
    """Return a command that runs another as an ordinary user; skips where it cannot."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; as an ordinary user, the other tests say the same")
    if shutil.which("setpriv") is None or not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"there is no setpriv, or no {SYSTEM_PYTHON}")
    asked = "import sys; raise SystemExit(sys.version_info < (3, 10))"
    if subprocess.run([SYSTEM_PYTHON, "-c", asked], check=False).returncode:
        pytest.skip(f"{SYSTEM_PYTHON} is older than 3.10")
    closed = [folder for folder in (REPOSITORY, *REPOSITORY.parents) if not folder.stat().st_mode & stat.S_IXOTH]
    if closed:
        pytest.skip(f"other users cannot enter {closed[-1]}, so they cannot read the repository")
    return ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
