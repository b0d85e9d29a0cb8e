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


MACHINE = """
import os
from mrlm_pl.sandbox import MACHINE_PATH, Sandbox
from mrlm_pl.sandbox.wall import kernel

try:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    for folder in ("/usr/share", "/usr/local"):
        kernel.mount("tmpfs", folder, "tmpfs", 0, "mode=1777")
except OSError as error:
    print("skip", error)
    raise SystemExit
os.mkdir("/usr/share/inner")
kernel.mount("tmpfs", "/usr/share/inner", "tmpfs", 0, "mode=1777")
for path in ("/usr/share/inner/file", "/usr/share/file"):
    with open(path, "w") as file:
        file.write("machine")
    os.chmod(path, 0o666)
os.mkdir("/usr/local/bin")
os.symlink("/usr/local/missing-1", "/usr/local/missing")
os.symlink("/opt/missing/sh", "/usr/local/bin/sh")
with open("/usr/local/libraries", "wb") as file:
    file.write(b"2 libraries\\0libtinfo.so.6\\0/opt/missing/lib/libtinfo.so.6\\0")
kernel.mount("/usr/local/libraries", "/etc/ld.so.cache", None, kernel.MS_BIND)
time = os.stat("/dev/null").st_mtime_ns
sandbox = Sandbox(level="namespaces", wall_seconds=100)
print(sandbox.shell('''
for folder in /usr/share /usr/share/inner; do
  test -e $folder/file || echo no file
  (echo x > $folder/file; touch $folder/new; mkdir $folder/folder; ln $folder/file $folder/link) 2> /dev/null
done
touch /dev/null 2> /dev/null && echo touched
mkdir /opt/missing; ln -s /bin/true /opt/missing/sh
mkdir -p /usr/local/share/perl 2> /dev/null && echo wrote where Perl looks for modules
test -s /etc/ld.so.cache && echo libraries of a folder that scripts can make
PATH=@ sh -c 'exit 1' && echo started a program of the script
'''.replace("@", MACHINE_PATH)).output.split())
changed = [path for path in ("/usr/share/inner/file", "/usr/share/file") if open(path).read() != "machine"]
print(changed, sorted(os.listdir("/usr/share/inner") + os.listdir("/usr/share")), end=" ")
print(os.stat("/dev/null").st_mtime_ns - time)
"""


def test_scripts_change_and_replace_nothing_of_a_machine_with_mounts_and_broken_links() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system there")
    done = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout)
    assert done.stdout.splitlines() == ["[]", "[] ['file', 'file', 'inner'] 0"]
