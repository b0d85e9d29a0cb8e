"""The sandbox as its users see it: limits, endings, a program's environment, and levels."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.sandbox import Cell, Execution, IsolationName, Sandbox
from mrlm_pl.sandbox import sandbox as sandbox_module
from mrlm_pl.sandbox.host import server_process
from mrlm_pl.sandbox.host.server_process import ServerProcess, server
from mrlm_pl.sandbox.inside.candidate import SHELL_TIMED_OUT
from mrlm_pl.sandbox.wall.confinement import CellSettings

LEVELS = ("namespaces", "landlock", "limits")
SLACK = 30.0
"""Seconds that a busy machine may add."""


def ended_after(output: str, level: str, run: Callable[[Sandbox], Execution]) -> tuple[Execution, float]:
    """Run a program with the first time limit that it lives long enough to print this in; return the limit too."""
    for seconds in (1.0, 4.0, 16.0, 64.0):
        done = run(Sandbox(level=level, wall_seconds=seconds))
        if done.output:
            break
    assert done.output == output
    return done, seconds


def cell_of(level: str, **changes: int | bool) -> Cell:
    host = server(level)
    usual = {"memory_mb": 512, "cpu_seconds": 30, "disk_mb": 64, "shell": False}
    return Cell(host, CellSettings(number=next(host.numbers), **{**usual, **changes}), 65536)


def test_output_and_the_last_value_are_shown(level: str) -> None:
    done = Sandbox(level=level).run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[6 * 7]")
    assert done.output == "out\nerr\n[42]\n"
    assert (done.cut, done.error, done.ending, done.status) == (False, None, None, None)
    assert done.isolation == level
    assert 0 < done.seconds < SLACK


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(200)", "input() or 2 ** 10 ** 10"])
def test_wall_time(level: str, program: str) -> None:
    source = f"import os; os.dup2(os.pipe()[0], 0)\nprint('up')\n{program}"
    done, seconds = ended_after("up\n", level, lambda sandbox: sandbox.run(source))
    assert (done.ending, done.error) == ("time", None)
    assert seconds <= done.seconds < seconds + SLACK


def test_processor_time(level: str) -> None:
    started = time.monotonic()
    with cell_of(level, cpu_seconds=1) as cell:
        assert cell.request({"operation": "run", "source": "while True: pass"}, started + 60) == {}
    assert cell.ending == "exit"
    assert time.monotonic() - started > 0.9


def test_a_sandbox_bounds_processor_time_a_little_above_wall_time() -> None:
    done = Sandbox(wall_seconds=2.5).run("import resource; resource.getrlimit(resource.RLIMIT_CPU)")
    assert done.output == "(4, 4)\n"


def test_memory(level: str) -> None:
    sandbox = Sandbox(level=level, memory_mb=128)
    assert sandbox.run("len(bytearray(16 << 20))").output == f"{16 << 20}\n"
    assert sandbox.run("len(bytearray(160 << 20))").error == "MemoryError"


def test_memory_of_all_processes_of_a_script(level: str) -> None:
    # The shell replaces itself by the last command of a list and gives its memory back, so that must not be the sleep.
    # It keeps two bytes for each character: 20 MB in each of six processes.
    script = "for i in 1 2 3 4 5 6; do (x=$(head -c 10000000 /dev/zero | tr '\\0' x); sleep 100; true) & done; wait"
    done = Sandbox(level=level, memory_mb=64, wall_seconds=100).shell(script)
    assert done.ending == "memory"
    assert Sandbox(level=level, memory_mb=256, wall_seconds=100).shell(script.replace("100;", "0.2;")).status == 0


def test_output_is_cut(level: str) -> None:
    done = Sandbox(level=level, output_kb=1).run("print('ä' * 100_000)")
    assert (done.output, done.cut, done.ending) == ("ä" * 512, True, None)
    assert Sandbox(level=level, output_kb=1).run("print('x' * 1023)").cut is False


def test_a_flood_of_output_ends_a_program(level: str) -> None:
    done = Sandbox(level=level, wall_seconds=100, output_kb=2).run("while True: print('x' * 60_000)")
    assert (done.ending, done.cut, len(done.output)) == ("output", True, 2048)


def test_disk(level: str) -> None:
    program = """
import time
for number in range(40):
    with open(f"file{number}", "wb") as file: file.write(bytes([number]) * (1 << 20))
time.sleep(100)
"""
    done = Sandbox(level=level, disk_mb=4, wall_seconds=100).run(program)
    if level == "namespaces":
        assert done.error == "OSError: [Errno 28] No space left on device"
    else:
        assert done.ending == "disk"
    assert (
        Sandbox(level=level, disk_mb=64, wall_seconds=100).run(program.replace("sleep(100)", "sleep(.2)")).error is None
    )


@pytest.mark.parametrize(
    "kept",
    [
        "tempfile.TemporaryFile(buffering=0)",
        "os.fdopen(os.memfd_create('x'), 'wb', 0)",  # rejected where there is a filter
    ],
)
def test_disk_of_files_without_a_name(level: str, kept: str) -> None:
    program = f"""
import os, tempfile, time
kept = [{kept} for _ in range(16)]
for file in kept: file.write(bytes(1 << 20))
time.sleep(100)
"""
    done = Sandbox(level=level, disk_mb=4, wall_seconds=100).run(program)
    assert done.ending == "disk" or (done.error or "")[:18] in ("OSError: [Errno 28", "PermissionError: [")


def test_one_large_file(level: str) -> None:
    done = Sandbox(level=level, disk_mb=2).run("with open('file', 'wb') as file: file.write(bytes(8 << 20))")
    assert done.ending == "disk" or (done.error or "")[:18] in ("OSError: [Errno 27", "OSError: [Errno 28")


def test_number_of_files(level: str) -> None:
    done = Sandbox(level=level, wall_seconds=100).run(
        "import time\nfor number in range(9_000): open(str(number), 'w').close()\ntime.sleep(100)"
    )
    assert done.ending == "disk" or (done.error or "").startswith("OSError: [Errno 28] No space left on device")


def test_open_files_and_threads() -> None:
    assert "Too many open files" in (Sandbox().run("kept = [open('f', 'w') for _ in range(100)]").error or "")
    threads = "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(20,)).start()"
    assert "can't start new thread" in (Sandbox().run(threads).error or "")


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E: <exception str() failed>"),
        ("raise ValueError('x' * 10_000)", "x" * 2000),
    ],
)
def test_errors(program: str, error: str) -> None:
    done = Sandbox().run(program)
    assert (done.error, done.ending) == (error, None)


def test_a_program_that_is_no_python() -> None:
    assert "SyntaxError: " in (Sandbox().run("def f(:").error or "")


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("import os; os._exit(0)", "exit"),
        ("import os; os.close(3); os.close(4)", "exit"),
        ("import ctypes; ctypes.string_at(0)", "exit"),
        ("import os; os.write(4, b'no json\\n')", "protocol"),
        ("import os; os.write(4, b'[1]\\n')", "protocol"),
        ("import os; os.write(4, b'[' * 100_000 + b'\\n')", "protocol"),
        ("import os\nwhile True: os.write(4, b'x' * 60_000)", "output"),
    ],
)
def test_endings(level: str, program: str, ending: str) -> None:
    done = Sandbox(level=level, wall_seconds=100).run(program)
    assert (done.ending, done.error) == (ending, None)


def test_an_ended_cell_stays_ended_and_closes_twice(level: str) -> None:
    cell = cell_of(level)
    for _ in range(2):
        assert cell.request({"operation": "run", "source": "import os; os._exit(0)"}, time.monotonic() + 60) == {}
        assert cell.ending == "exit"
    cell.close()
    cell.close()


def test_a_session_goes_on_and_ends_with_its_cell(level: str) -> None:
    sandbox = Sandbox(level=level)
    with sandbox.open() as cell:
        sandbox.execute(cell, {"operation": "run", "source": "x = 6; open('file', 'w').close()"})
        assert sandbox.execute(cell, {"operation": "run", "source": "x * 7"}).output == "42\n"
    assert sandbox.run("import os; ('x' in globals(), os.listdir())").output == "(False, [])\n"


def test_scripts(level: str) -> None:
    done = Sandbox(level=level).shell("echo out; echo err >&2; exit 3")
    assert (done.output, done.status, done.ending, done.isolation) == ("out\nerr\n", 3, None, level)
    assert Sandbox(level=level).shell(f"exit {SHELL_TIMED_OUT}").ending is None
    assert Sandbox(level=level).shell("echo 123> f; ls").output == "\nf\n", "descriptor 123, as in published tasks"


def test_scripts_that_take_too_long(level: str) -> None:
    done, seconds = ended_after("up\n", level, lambda sandbox: sandbox.shell("echo up; sleep 200 & sleep 200"))
    assert done.ending == "time"
    assert seconds <= done.seconds < seconds + SLACK


def test_files_of_scripts_last_in_a_cell() -> None:
    sandbox = Sandbox()
    if sandbox.isolation != "namespaces":
        pytest.skip("a shell's private system needs namespaces")
    with sandbox.open(shell=True) as cell:
        sandbox.script(cell, "echo kept > ~/file; sleep 60 & echo $! > pid")
        assert sandbox.script(cell, "cat ~/file; kill -0 $(cat pid) && pwd").output == "kept\n/home/student\n"
    assert sandbox.shell("ls -A ~").output == ""


def test_nothing_of_the_host_is_inside(level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MRLM_TEST_SECRET", "hush")
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    os.set_inheritable(write, True)
    host = ServerProcess(level)
    program = """
import json, os
found = []
for number in range(2048):
    try: os.fstat(number)
    except OSError: continue
    found.append(number)
print(json.dumps([sorted(os.environ), os.environ["HOME"], os.getcwd(), found]))
"""
    try:
        assert Path(f"/proc/{host._process.pid}/environ").read_bytes() == b"PYTHONHASHSEED=0\0", (
            "unset variables still lie in memory"
        )
        settings = CellSettings(next(host.numbers), 512, 10, 64, shell=False)
        with Cell(host, settings, 65536) as cell:
            cell.request({"operation": "run", "source": program}, time.monotonic() + 60)
            variables, home, folder, descriptors = json.loads(cell.output()[0])
    finally:
        host.close()
        os.close(read)
        os.close(write)
    assert set(variables) <= {"PATH", "LANG", "LC_CTYPE", "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"}
    assert home == folder
    assert folder == "/box" if level == "namespaces" else folder.startswith(tempfile.gettempdir())
    assert descriptors == [0, 1, 2, 3, 4]


def test_a_cell_leaves_no_folder(level: str) -> None:
    with cell_of(level) as cell:
        cell.request({"operation": "run", "source": "open('file', 'w').close()"}, time.monotonic() + 60)
        folder = cell.server.folder_of(cell.settings.number)
        assert os.path.exists(f"{folder}/file") if folder else level == "namespaces"
    assert not folder or not os.path.exists(folder)


def test_many_threads_at_once(level: str) -> None:
    sandbox = Sandbox(level=level, wall_seconds=100)
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda n: sandbox.run(f"{n}, sum(range(100_000))"), range(48)))
    assert [one.output for one in done] == [f"({n}, 4999950000)\n" for n in range(48)]


def test_programs_wait_for_a_processor() -> None:
    """With more programs at once than processors, each has a processor for itself while its time runs."""
    running, most, lock, all_busy = 0, 0, threading.Lock(), threading.Event()

    def one(_: int) -> None:
        nonlocal running, most
        with sandbox_module.running():
            with lock:
                running += 1
                most = max(most, running)
                if most == max(os.cpu_count() or 2, 2):
                    all_busy.set()
            all_busy.wait(60)
            time.sleep(0.02)
            with lock:
                running -= 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(32)))
    assert most == max(os.cpu_count() or 2, 2)


def test_the_server_survives_the_thread_that_started_it(level: str) -> None:
    started: list[ServerProcess] = []
    thread = threading.Thread(target=lambda: started.append(ServerProcess(level)))
    thread.start()
    thread.join()
    (host,) = started
    time.sleep(0.1)
    settings = CellSettings(next(host.numbers), 512, 10, 64, shell=False)
    with Cell(host, settings, 65536) as cell:
        cell.request({"operation": "run", "source": "print('here')"}, time.monotonic() + 60)
        assert cell.output() == ("here\n", False)
    host.close()
    host.close()
    assert not host.alive
    with pytest.raises(SandboxError, match="server is gone"):
        Cell(host, settings, 65536)


def test_a_closed_cell_takes_no_request(level: str) -> None:
    with Sandbox(level=level).open() as cell:
        pass
    ends = [os.pipe() for _ in range(8)]  # have the descriptors of the cell
    try:
        with pytest.raises(ValueError, match="negative"):
            cell.request({"operation": "run", "source": "1"}, time.monotonic() + 1)
    finally:
        for end in itertools.chain(*ends):
            os.close(end)


def test_a_level_that_does_not_exist_is_none_of_the_levels() -> None:
    host = ServerProcess("")  # type: ignore[arg-type]
    try:
        with pytest.raises(SandboxError, match="KeyError: ''"):
            Cell(host, CellSettings(next(host.numbers), 512, 10, 64, shell=False), 65536)
    finally:
        host.close()


def test_a_new_server_takes_the_place_of_one_that_died(level: str) -> None:
    server(level).close()
    assert Sandbox(level=level).run("1 + 1").output == "2\n"


def test_a_request_to_end_a_cell_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ServerProcess("limits")
    link, sent = host._link, []

    class Losing:
        def send(self, message: bytes) -> int:
            sent.append(message)
            return len(message) if len(sent) == 1 else link.send(message)

        def __getattr__(self, name: str) -> Any:
            return getattr(link, name)

    try:
        settings = CellSettings(next(host.numbers), 512, 30, 64, shell=False)
        cell = Cell(host, settings, 65536)
        monkeypatch.setattr(host, "_link", Losing())
        cell.close()
        monkeypatch.undo()
        assert len(sent) >= 2
    finally:
        host.close()


def test_a_cell_that_does_not_end_is_reported_with_the_state_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "KILL_SECONDS", 1)
    host = ServerProcess("limits")
    try:
        cell = Cell(host, CellSettings(next(host.numbers), 512, 30, 64, shell=False), 65536)
        os.kill(host._process.pid, signal.SIGSTOP)
        with pytest.raises(SandboxError, match=rf"cell 1 .* does not end within 1 s; .*{host._process.pid}: 'T'"):
            cell.close()
    finally:
        os.kill(host._process.pid, signal.SIGCONT)
        host.close()


def test_a_killed_server_leaves_no_folder(level: str) -> None:
    host = ServerProcess(level)
    settings = CellSettings(next(host.numbers), 512, 10, 64, shell=False)
    with Cell(host, settings, 65536) as cell:
        cell.request({"operation": "run", "source": "open('file', 'w').close()"}, time.monotonic() + 60)
        folder = host.folder_of(settings.number)
        assert os.path.exists(f"{folder}/file") if folder else level == "namespaces"
        os.kill(host._process.pid, signal.SIGKILL)
        assert cell.request({"operation": "run", "source": "while True: pass"}, time.monotonic() + 60) == {}
        assert cell.ending is not None
    host.close()
    assert not folder or not os.path.exists(os.path.dirname(folder))


def test_a_level_that_cannot_be_set_up_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def refuse(level: IsolationName, packages: tuple[str, ...]) -> ServerProcess:
        started.append((level, packages))
        raise server_process.LevelError(f"sandbox level {level!r} cannot be set up here: no module {packages}")

    monkeypatch.setattr(server_process, "ServerProcess", refuse)
    monkeypatch.setattr(server_process, "_refused", {})
    for _ in range(2):
        for packages in (("one",), ("two",)):
            with pytest.raises(SandboxError, match=f"'limits' cannot be set up here: no module .*{packages[0]}"):
                server("limits", packages)
    assert started == [("limits", ("one",)), ("limits", ("two",))]


def test_a_server_that_starts_late_is_no_reason_for_a_weaker_level(monkeypatch: pytest.MonkeyPatch) -> None:
    strongest, _ = server_process.strongest()
    monkeypatch.setattr(server_process, "STARTUP_SECONDS", 0.001)
    monkeypatch.setattr(server_process, "_servers", {})
    monkeypatch.setattr(server_process, "_refused", dict(server_process._refused))
    sandbox_module._strongest_level.cache_clear()
    with pytest.raises(SandboxError, match=rf"of level '{strongest}' did not start within 0\.001 s; try again[^;]*$"):
        _ = Sandbox().isolation
    monkeypatch.setattr(server_process, "STARTUP_SECONDS", 60.0)
    assert Sandbox().isolation == strongest
    server_process._close_all()  # the servers of this test


def test_another_system_than_linux_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process.sys, "platform", "darwin")
    monkeypatch.setattr(server_process.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(server_process, "_servers", {})
    with pytest.raises(
        SandboxError, match=r"^the sandbox needs Linux, and this is Darwin; use a Linux container .*`mrlm serve`"
    ):
        server_process.strongest()


def test_a_minimum_that_is_not_met_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(level: IsolationName) -> ServerProcess:
        if level == "namespaces":
            raise server_process.LevelError("sandbox level 'namespaces' cannot be set up here: unshare: not permitted")
        return server(level)

    monkeypatch.setattr(server_process, "server", refuse)
    sandbox_module._strongest_level.cache_clear()
    try:
        with pytest.raises(ConfigurationError) as refused:
            _ = Sandbox(minimum="namespaces").isolation
        weaker = Sandbox(minimum="limits").isolation
    finally:
        sandbox_module._strongest_level.cache_clear()
    for part in ("sandbox.minimum is 'namespaces'", "unshare: not permitted", "max_user_namespaces", "lower"):
        assert part in str(refused.value)
    assert weaker in ("limits", "landlock")


def test_a_weaker_level_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sandbox_module, "strongest", lambda: ("limits", {"landlock": "no Landlock here"}))
    sandbox_module._strongest_level.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert Sandbox().isolation == "limits"
    sandbox_module._strongest_level.cache_clear()
    assert "no Landlock here" in caplog.text
    assert "level 'limits' only" in caplog.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"wall_seconds": 0}, "Sandbox: wall_seconds is 0;"),
        ({"wall_seconds": float("inf")}, "Sandbox: wall_seconds is inf;"),
        ({"wall_seconds": float("nan")}, "Sandbox: wall_seconds is nan;"),
        ({"memory_mb": 63}, "Sandbox: memory_mb is 63; it must be 64"),
        ({"disk_mb": 0}, "Sandbox: disk_mb is 0; it must be 1"),
        ({"output_kb": 0}, "Sandbox: output_kb is 0; it must be 1"),
        ({"level": ""}, "Sandbox: level is ''; choose from limits, landlock, namespaces"),
        ({"minimum": "walls"}, "Sandbox: minimum is 'walls'; choose from"),
        ({"level": "limits", "minimum": "landlock"}, "weaker than sandbox.minimum, 'landlock'"),
    ],
)
def test_settings_out_of_range(options: dict, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Sandbox(**options)


def test_a_kill_of_a_cell_that_is_gone_is_answered() -> None:
    found = server("limits")
    number, ended = next(found.numbers), threading.Event()
    found._ended[number] = ended  # as after a lost message
    found.kill(number, ended)
    assert ended.is_set()


def test_a_server_without_a_listener_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ServerProcess("limits")
    monkeypatch.setattr(found, "_receive", lambda: 1 / 0)
    ended = threading.Event()
    found._ended[7] = ended
    with pytest.raises(ZeroDivisionError):
        found._listen()
    assert ended.is_set()
    assert not found.alive
    found.close()
