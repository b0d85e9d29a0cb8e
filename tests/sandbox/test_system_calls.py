"""System calls by number, with odd arguments: each level answers as the table in ``declared_calls`` says."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
from pathlib import Path

import pytest

from mrlm_pl.sandbox import Sandbox
from mrlm_pl.sandbox.wall import landlock, system_calls
from mrlm_pl.sandbox.wall.kernel import ending_with_parent
from tests.support.attacks.declared_calls import DECLARED

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the table is of x86-64")
COLUMNS = {("namespaces", False): 0, ("namespaces", True): 1, ("landlock", False): 2, ("landlock", True): 3}
NUMBERS = range(600)
# They end, replace or stop the process that calls them.
NEVER_CALLED = {
    "rt_sigreturn", "pause", "fork", "vfork", "exit", "exit_group", "restart_syscall", "uretprobe", "uprobe"
}  # fmt: skip
PROGRAM = """
import ctypes, errno, json, os, random
libc, drawn = ctypes.CDLL(None, use_errno=True), random.Random(16)
libc.syscall.restype = ctypes.c_long
HIGH, TOP = 1 << 32, 1 << 63
ODD = (0, 1, 2, 3, 5, -1, -2, 17, 255, 0x7FF, 0x1000, 0o4000, 0o2000000, 0x8000, 1 << 16, 1 << 17, 1 << 28, 1 << 29,
       1 << 30, (1 << 31) - 1, 1 << 31, HIGH - 1, HIGH, HIGH + 1, 1 << 62, -TOP, -HIGH, os.getpid())
KINDS = (*range(16), 0o4002, 0o2000002, 0o2004003, 0o4001, HIGH + 2, 0x7FFFFFF2)

def call(number, values):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, values))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else str(result)

def refusal(name, values):
    # The error that the filter gives; None where it lets the call pass.
    first, second = values[0] % HIGH, values[1] % HIGH
    if name == "socketpair": return None if first == 1 and second % 16 in (1, 5) else "EACCES"
    if name == "sendto": return None if values[4] == 0 else "EACCES"
    if name == "fcntl": return "EINVAL" if second in (8, 10, 15, 1024, 1026) or second > 1038 else None
    if name == "ioctl": return None if second in (0x541B, 0x5421, 0x5450, 0x5451, 0x5460, 0x5401) else "ENOTTY"
    if name == "prlimit64": return None if first == 0 else "EPERM"
    if name == "prctl": return "EPERM" if first in (1, 4, 35, 0x59616D61) or first > 1 << 31 else None
    if name == "clone" and first & 0x7E020000: return "EPERM"
    if name == "clone": return None if SCRIPTS or first & 0x10000 else "EPERM"
    return "EPERM" if ALONE and first != os.getpid() else None  # kill, tgkill

def harmless(name, values):
    # Calls that the kernel refuses where the filter lets them pass: no descriptor, no address, no signal.
    if name == "socketpair": return [*values[:2], 0, 16, 0, 0]
    if name == "sendto": return [-1, 0, 0, 0, values[4], 0]
    if name in ("fcntl", "ioctl"): return [-1, *values[1:]]
    if name == "prlimit64": return [values[0], -1, 0, 0, 0, 0]
    if name in ("kill", "tgkill"): return [values[0], 999, 999, 0, 0, 0]
    return values

CASES = {"socketpair": [(family, kind) for family in (*range(46), HIGH + 1) for kind in KINDS],
         "prctl": [(option, 0) for option in (1, 4, 35, 0x59616D61, HIGH + 1, 1 - HIGH)],
         "fcntl": [(-1, command) for command in range(1060)],
         "ioctl": [(-1, command) for command in (0x5412, 0x8901, 0x8912, 0x541B, 0x40086602, HIGH + 0x5412)]}
KERNELS = ("EFAULT", "EBADF", "EINVAL", "ENOTSUP", "EPROTONOSUPPORT", "ESRCH")
wrong = []
for number, (name, answer) in enumerate(TABLE):
    own = os.getuid() >= 60000
    answer = {"owner": "+" if own else "EPERM", "quiet": "+" if own else "0"}.get(answer, answer)
    cases = [[drawn.choice(ODD) for _ in range(6)] for _ in range(12)]
    for values in cases + [[*case, 0, 0, 0, 0] for case in CASES.get(name, [])]:
        if answer == "?":
            want = refusal(name, values)
            if want is None and name in ("prctl", "clone"): continue  # it would be done
            found = call(number, harmless(name, values))
            right = found == want if want else found in KERNELS
        elif answer == "+":
            if name in NEVER_CALLED: break
            want, found = "the kernel's answer", call(number, [-1] * 6)
            right = found != "ENOSYS" or number > 334 or name == "futex"
        else:
            want, found = answer, call(number, values)
            right = found == want and call(number + HIGH, values) == want
        if not right: wrong.append([number, name, values, want, found])
foreign = [bit | number for number in range(600) for bit in (1 << 30, 1 << 31)]
for number in (*range(600, 1100), *foreign, (1 << 31) - 1, -1):
    found = call(number, [drawn.choice(ODD) for _ in range(6)])
    if found != "ENOSYS": wrong.append([number, "none", [], "ENOSYS", found])
print(json.dumps(wrong[:20]))
"""


def declared(column: int) -> list[tuple[str, str]]:
    """Return name and answer of every number."""
    found, answers = {}, [""]
    for line in DECLARED.strip().splitlines():
        if not line.startswith(" "):
            answers = line.split()
            continue
        for entry in line.split():
            name, number = entry.split("=")
            assert int(number) not in found, f"{entry} occurs twice"
            found[int(number)] = name, answers[column]
    return [found.get(number, ("none", "ENOSYS")) for number in NUMBERS]


@pytest.mark.parametrize("scripts", [False, True])
def test_every_number_is_answered_as_declared(level: str, scripts: bool) -> None:
    if level == "limits":
        status = Sandbox(level="limits").run("print(open('/proc/self/status').read())").output
        assert "Seccomp:\t0\n" in status, "there is no filter at all, as the documents say"
        return
    if level == "landlock" and landlock.version() < 3:
        pytest.skip("truncating by path depends on the kernel here")
    table = [[name, "+" if answer == "truncate" else answer] for name, answer in declared(COLUMNS[level, scripts])]
    alone = level == "landlock" and not scripts
    given = f"TABLE, NEVER_CALLED = {table!r}, {sorted(NEVER_CALLED)!r}\nALONE, SCRIPTS = {alone}, {scripts}\n"
    sandbox = Sandbox(level=level, wall_seconds=60)
    with sandbox.open(shell=scripts) as cell:
        done = sandbox.execute(cell, {"operation": "run", "source": given + PROGRAM})
    assert (done.error, done.ending) == (None, None), done.output
    assert json.loads(done.output) == []


def test_a_command_that_ends_with_its_parent_has_the_usual_signals(tmp_path: Path) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
        command = [*ending_with_parent(signal.SIGKILL), "sh", "-c", f"kill -{int(number)} $$"]
        assert subprocess.run(command, check=False, cwd=tmp_path).returncode == -number


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_no_number_stands_for_two_calls(machine: str, column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    del machine  # names the case
    monkeypatch.setattr(system_calls, "_COLUMN", -column)
    text = Path(system_calls.__file__).read_text()
    tables = [part.split('"')[0] for part in text.replace('"""', '"').split('_numbers("')[1:]]
    numbers = [number for table in tables for number in system_calls._numbers(table).values()]
    assert len(numbers) == len(set(numbers)) > 250
