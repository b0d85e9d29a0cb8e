"""The processes around a sandbox: trainers that fork, end or are killed, and their remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrlm_pl.sandbox.host.usage import process_tree

REPOSITORY = Path(__file__).parents[2]
SECONDS = 200
WITH_A_PROGRAM = """
import sys, threading, time
from mrlm_pl.sandbox import Sandbox
from mrlm_pl.sandbox.host import server_process
sandbox = Sandbox(level=sys.argv[1], wall_seconds=600)
cell = sandbox.open()
sandbox.execute(cell, {"operation": "run", "source": "open('file', 'w').close()"})
endless = {"operation": "run", "source": "while True: pass"}
threading.Thread(target=sandbox.execute, args=(cell, endless), daemon=True).start()
shell = sandbox.open(shell=True)
started = "setsid sleep 300 & sleep 300 & nohup setsid sh -c 'sleep 301; true' &"
sandbox.script(shell, f"mkdir -m 0 closed; {started} sleep .3")
print("up", server_process.server(cell.server.level)._process.pid, flush=True)
time.sleep(600)
"""
# Each cell does its best to outlive the server, which is then killed alone.
WITHOUT_SERVER = """
import sys, threading, time
from mrlm_pl.sandbox import Sandbox
from mrlm_pl.sandbox.host import server_process
FREED = '''
import ctypes, signal
for option in (1, (1 << 32) + 1): ctypes.CDLL(None).syscall(157, ctypes.c_long(option), 0, 0, 0, 0)
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): continue
while True: pass
'''
sandbox = Sandbox(level=sys.argv[1], wall_seconds=600)
cell, shell = sandbox.open(), sandbox.open(shell=True)
freed = {"operation": "run", "source": FREED}
threading.Thread(target=sandbox.execute, args=(cell, freed), daemon=True).start()
sandbox.script(shell, "trap '' TERM HUP INT; nohup sleep 300 & (sleep 300; true) & sleep .3")
print("up", server_process.server(cell.server.level)._process.pid, flush=True)
time.sleep(600)
"""
FORKING = """
import os, sys, threading, time
from mrlm_pl.sandbox import Sandbox
from mrlm_pl.sandbox.host import server_process
sandbox = Sandbox(level=sys.argv[1], wall_seconds=100)
own = sandbox.open()
busy = [threading.Thread(target=sandbox.run, args=("import time; time.sleep(1)",)) for _ in range(os.cpu_count() + 1)]
for thread in busy: thread.start()
time.sleep(0.5)
before = server_process.server(sandbox.isolation)._process.pid
child = os.fork()
if child == 0:
    started = time.monotonic()
    assert sandbox.run("6 * 7").output == "42\\n"
    assert server_process.server(sandbox.isolation)._process.pid != before
    own.close()  # the parent's
    server_process._close_all()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert sandbox.execute(own, {"operation": "run", "source": "1 + 1"}).output == "2\\n", "it lives"
for thread in busy: thread.join()
assert server_process.server(sandbox.isolation)._process.pid == before
assert sandbox.run("1 + 2").output == "3\\n"
"""
# A process that a killed trainer forked must not keep its server alive.
FORKED_AND_KILLED = WITH_A_PROGRAM.replace(
    'print("up"', 'import os\nif os.fork() == 0: os.close(1); time.sleep(200); os._exit(0)\nprint("up"'
)
USING = """
import sys
from mrlm_pl.sandbox import Sandbox, Tests, grade
sandbox = Sandbox(level=sys.argv[1])
sandbox.run("import os, tempfile; os.mkdir('a', 0); tempfile.mkdtemp(); open('b', 'w').close()")
sandbox.shell("mkdir -p a/b c; ln -s / a/root; touch a/b/file; chmod 0 a; sleep 100 &")
assert grade(sandbox, "open('file', 'w').close()\\ndef f(): return 1", Tests(("assert f() == 1",))).solved
cell = sandbox.open()
cell.request({"operation": "run", "source": "open('b', 'w').close()"}, float("inf"))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="mrlm-trainer-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def trainer(temporary: Path, level: str) -> Callable[..., subprocess.Popen[str]]:
    """Starts a process that runs a program at the level, with its own temporary folder."""

    def start(program: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, level],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def alive(processes: list[int]) -> list[int]:
    found = []
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(process)
    return found


def wait_until_gone(processes: list[int]) -> list[int]:
    """Return the processes that are left after a minute."""
    end = time.monotonic() + 60
    while alive(processes) and time.monotonic() < end:
        time.sleep(0.02)
    return alive(processes)


def left_after_kill(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    word, number = process.stdout.readline().split()
    assert word == "up"
    members = list(process_tree(int(number)))
    assert len(alive(members)) >= 4, "the server, a program, a shell, and what its script started"
    process.send_signal(signal.SIGKILL)
    process.wait(SECONDS)
    return wait_until_gone(members)


@pytest.mark.long_after(1)
def test_a_killed_trainer_leaves_nothing(trainer: Callable, level: str, temporary: Path) -> None:
    process = trainer(WITH_A_PROGRAM)
    try:
        assert left_after_kill(process) == []
    finally:
        process.kill()
    assert list(temporary.iterdir()) == []


def test_a_killed_server_leaves_nothing(trainer: Callable, level: str) -> None:
    if level == "limits":
        pytest.skip("mere limits do not keep a program from outliving its server")
    process = trainer(WITHOUT_SERVER)
    try:
        assert process.stdout is not None
        word, number = process.stdout.readline().split()
        assert word == "up"
        members = list(process_tree(int(number)))
        assert len(alive(members)) >= 5, "the server, a program, a shell, and what its script started"
        os.kill(int(number), signal.SIGKILL)
        assert wait_until_gone(members) == []
    finally:
        process.kill()


@pytest.mark.long_after(1)
def test_a_forked_process_does_not_keep_the_server_of_a_killed_trainer(trainer: Callable, level: str) -> None:
    process = trainer(FORKED_AND_KILLED)
    try:
        assert left_after_kill(process) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long_after(1)
def test_a_forked_process_has_a_server_of_its_own(trainer: Callable, level: str, temporary: Path) -> None:
    process = trainer(FORKING)
    try:
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    assert list(temporary.iterdir()) == []


@pytest.mark.long_after(1)
def test_nothing_is_left_in_the_temporary_folder_after_use(trainer: Callable, level: str, temporary: Path) -> None:
    process = trainer(USING)
    try:
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    assert list(temporary.iterdir()) == []
