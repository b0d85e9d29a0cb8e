"""The limits of a cell that shares its user: the user's tasks are counted first."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FREE_USERS = 2_000_000_000
"""No user is numbered beyond this, so that with a process id added the number is free."""

PROGRAM = """
import json, os, sys, threading, time
from mrlm_pl.sandbox.wall import kernel
from mrlm_pl.sandbox.wall.confinement import _tasks_of_user

user = int(sys.argv[1])
try:
    kernel.become_user(user)
except OSError as error:
    print(json.dumps(str(error)))
    sys.exit()
kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else its entries in /proc stay root's

def listed():
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += len(os.listdir(f"/proc/{name}/task")) if os.stat(f"/proc/{name}").st_uid == user else 0
        except OSError:  # another user's process, which ended meanwhile
            pass
    return found

counts = [(_tasks_of_user(), listed())]
end = threading.Event()
threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
counts.append((_tasks_of_user(), listed()))
reading, writing = os.pipe()
other = os.fork()  # a process with one task
if not other:
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
counts.append((_tasks_of_user(), listed()))
os.close(writing)
os.waitpid(other, 0)
end.set()
while listed() > counts[0][1]:  # a joined thread leaves /proc a little later
    time.sleep(0.001)
counts.append((_tasks_of_user(), listed()))
print(json.dumps(counts))
"""


def test_the_tasks_of_a_user_are_its_threads_and_those_of_its_processes() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user whose processes are all this test's own")
    command = [sys.executable, "-c", PROGRAM, str(FREE_USERS + os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    if isinstance(counts, str):
        pytest.skip(f"root cannot become another user here: {counts}")
    assert counts == [[1, 1], [4, 4], [5, 5], [1, 1]]
