"""The server: a small single-threaded process, started with an empty environment, that forks a child for each cell.

It holds nothing of the trainer's memory, so neither do its children. It imports what programs commonly import before it
forks, and lives in its own namespaces where the machine allows them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from mrlm_pl.sandbox.inside import candidate
from mrlm_pl.sandbox.removal import remove_tree
from mrlm_pl.sandbox.wall import confinement
from mrlm_pl.sandbox.wall import kernel as syscalls
from mrlm_pl.sandbox.wall.confinement import CellSettings

PRELOADED = """
    abc array bisect builtins calendar cmath collections contextlib copy csv dataclasses datetime decimal enum
    fractions functools hashlib heapq inspect io itertools json keyword linecache math numbers operator queue random
    re secrets statistics string struct textwrap threading time traceback types typing unicodedata unittest
"""
"""Modules that a program finds loaded."""

MAX_MESSAGE = 65_536
REQUESTS, REPLIES = 3, 4
"""Descriptors of a child's channel; its output goes to 1 and 2."""

SETUP_FAILED = 71


def main(descriptor: int, level: str, temporary: str, packages: str) -> NoReturn:
    """Serve until the other end of the socket is closed.

    Args:
        descriptor: descriptor of the socket to the trainer.
        level: ``namespaces``, ``landlock`` or ``limits``.
        temporary: folder for private folders, where there are no namespaces.
        packages: JSON object with packages that programs may import beyond the standard library, each with its folder.
    """
    link = socket.socket(fileno=descriptor)
    try:
        _Server(link, level, temporary, json.loads(packages)).serve()
    except BaseException:  # the process ends, and the other side tells the fault
        with suppress(OSError):
            link.send(json.dumps({"failed": traceback.format_exc(limit=-3)[-4000:]}).encode())
        os._exit(1)


class _Server:
    def __init__(self, link: socket.socket, level: str, temporary: str, packages: dict[str, str]) -> None:
        self.link, self.level = link, level
        self.cells: dict[int, int] = {}
        self.process = os.getpid()
        os.environ.clear()
        os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8", HOME="/", PYTHONDONTWRITEBYTECODE="1")
        os.environ.update(PYTHONHASHSEED="0")
        if packages:  # their libraries must not start threads: children are forked from this one
            os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        _close_all_but(link.fileno())
        self.folder = ""
        if level == "namespaces":
            confinement.enter_namespaces(packages.values())
            self._become_first_process()
            self.own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            os.chdir(confinement.BOX)
        else:
            if level == "landlock" and not confinement.landlock.version():
                raise OSError("the kernel has no Landlock")
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
            self.folder = tempfile.mkdtemp(prefix="mrlm-sandbox-", dir=temporary)
            os.chmod(self.folder, 0o711)
            os.chdir(self.folder)
        for module in PRELOADED.split():
            importlib.import_module(module)
        for package, folder in packages.items():
            sys.path.append(folder)
            importlib.import_module(package)
            sys.path.remove(folder)  # programs import the loaded package, and nothing else from the folder
        confinement.prepare(level)
        gc.collect()
        gc.freeze()  # children do not copy the pages of these objects by counting references on collection

    def _become_first_process(self) -> None:
        """Continue as the first process of the new process namespace; the former one waits and ends with it."""
        child = os.fork()
        if child:
            self.link.close()
            os.waitpid(child, 0)
            os._exit(0)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)

    def serve(self) -> NoReturn:
        """Open, kill and reap cells as asked."""
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_reader, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only its byte in the pipe is wanted
        self._send({"ready": os.getpid(), "folder": self.folder})
        while True:
            ready, _, _ = select.select([self.link.fileno(), wake_reader], [], [])
            if wake_reader in ready:
                with suppress(BlockingIOError):
                    os.read(wake_reader, 4096)
            if self.link.fileno() in ready:
                try:
                    text, descriptors, _, _ = socket.recv_fds(self.link, MAX_MESSAGE, 3)
                except ConnectionResetError:  # instead of an end, where the trainer died before it read all of ours
                    self._end()
                if not text:
                    self._end()
                self._handle(json.loads(text), descriptors)
            self._reap()

    def _handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "kill" in message:
            processes = [process for process, number in self.cells.items() if number == message["kill"]]
            for process in processes:
                self._kill(process)
            if not processes:  # it ended before; the trainer that asks again has missed that
                self._send({"ended": message["kill"]})
            return
        cell = CellSettings(**message["open"])
        if self.level == "namespaces":
            syscalls.unshare(syscalls.CLONE_NEWPID)
        process = os.fork()
        if process == 0:
            self._become_cell(cell, descriptors)
        if self.level == "namespaces":
            syscalls.enter_namespace(self.own_processes, syscalls.CLONE_NEWPID)
        self.cells[process] = cell.number
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_cell(self, cell: CellSettings, descriptors: list[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _arrange_descriptors(descriptors)
            sys.stdin = open(0)  # noqa: SIM115 (for the life of the process)
            sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            process = int(os.readlink("/proc/self"))  # as the trainer sees it, which watches all that the cell starts
            landlocked = {"limits": False, "landlock": True, "namespaces": True}[self.level]
            if self.level == "namespaces":
                confinement.confine_in_namespaces(cell)
            else:
                folder = f"{self.folder}/{cell.number}"
                os.mkdir(folder, 0o700)
                confinement.confine_in_folder(cell, folder, landlocked=landlocked)
                if os.getppid() != self.process:  # it died before it could be waited for
                    os._exit(SETUP_FAILED)
            confinement.forget_former_places()
            os.write(REPLIES, json.dumps({"process": process}).encode() + b"\n")
            candidate.serve(REQUESTS, REPLIES)
        except BaseException:  # as above
            fault = {"failed": traceback.format_exc(limit=-2)[-2000:]}
            with suppress(OSError):
                os.write(REPLIES, json.dumps(fault).encode() + b"\n")
        os._exit(SETUP_FAILED)

    def _reap(self) -> None:
        while True:
            child = None
            with suppress(ChildProcessError):
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if child is None:
                return
            if child.si_pid in self.cells and self.level != "namespaces":
                # Before it is reaped, its number cannot be another group's.
                self._kill_group(child.si_pid)
            _, status = os.waitpid(child.si_pid, 0)
            number = self.cells.pop(child.si_pid, None)
            if number is not None:
                if self.level == "limits":
                    self._kill_strays()
                self._send({"ended": number, "status": os.waitstatus_to_exitcode(status)})

    def _kill(self, process: int) -> None:
        """End a cell; the first process of a process namespace takes all others with it."""
        if self.level != "namespaces":
            self._kill_group(process)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    @staticmethod
    def _kill_group(leader: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)

    def _kill_strays(self) -> None:
        """Kill what left its process group: orphans become children of this process, which is a subreaper."""
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                strays = [int(word) for word in file.read().split() if int(word) not in self.cells]
            if not strays:
                return
            for process in strays:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.link.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._end()

    def _end(self) -> NoReturn:
        """End all cells and this process: the trainer is gone."""
        cells, self.cells = list(self.cells), {}
        for process in cells:
            self._kill(process)
        if self.folder:  # else the first process of the namespaces takes all with it
            for process in cells:
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)
            self._kill_strays()
            os.chdir("/")
            with suppress(OSError):  # there is no reader left
                remove_tree(self.folder)
        os._exit(0)


def _close_all_but(kept_descriptor: int) -> None:
    """Close every descriptor except one; 0, 1 and 2 become /dev/null."""
    dev_null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(dev_null, descriptor)
    os.closerange(3, kept_descriptor)
    os.closerange(kept_descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _arrange_descriptors(descriptors: list[int]) -> None:
    """Put a cell's requests, replies and output on their places, and close everything else."""
    high = [os.dup2(descriptor, 200 + index, inheritable=False) for index, descriptor in enumerate(descriptors)]
    for source, target in ((high[0], REQUESTS), (high[1], REPLIES), (high[2], 1), (high[2], 2)):
        os.dup2(source, target, inheritable=target in (1, 2))
    os.closerange(REPLIES + 1, os.sysconf("SC_OPEN_MAX"))
