"""The trainer's end of a sandbox server: starts it, opens cells in it, and learns when they end."""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.sandbox.host.usage import process_states
from mrlm_pl.sandbox.inside.server import MAX_MESSAGE
from mrlm_pl.sandbox.removal import remove_tree
from mrlm_pl.sandbox.wall.confinement import CellSettings
from mrlm_pl.sandbox.wall.isolation import STRENGTH, IsolationName

logger = logging.getLogger(__name__)

STARTUP_SECONDS = 60.0
KILL_SECONDS = 30
"""A killed process ends when the disk has taken its last write, which may take long on a busy disk."""

_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "package = sys.modules['mrlm_pl'] = type(sys)('mrlm_pl'); package.__path__ = [sys.argv[1]]; "
    "from mrlm_pl.sandbox.inside.server import main; "
    "main(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])"
)
"""Starts the server with the standard library alone: the package's own ``__init__`` needs other distributions."""


class LevelError(SandboxError):
    """The machine does not offer a level; an error of another class, such as a late start, says nothing of it."""


class ServerProcess:
    """A running server of one isolation level. Its methods may be called from any thread.

    Args:
        level: isolation level of its children.
        packages: packages that programs may import beyond the standard library; the server loads them at its start.

    Raises:
        LevelError: the machine does not offer the level, or a package cannot be loaded; the message says why.
        SandboxError: the server does not start in time, or the machine does not run Linux.

    Attributes:
        numbers: numbers of its next cells.
    """

    def __init__(self, level: IsolationName, packages: tuple[str, ...] = ()) -> None:
        if sys.platform != "linux":
            raise SandboxError(
                f"the sandbox needs Linux, and this is {platform.system()}; use a Linux container or virtual machine, "
                "or host the environment on a Linux machine (`mrlm serve`) and play on it as RemoteEnvironment"
            )
        self.level = level
        package_folders = {package: _package_folder(package) for package in packages}
        self.folders = tuple(sorted(set(package_folders.values())))
        self.owner = os.getpid()
        self.numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ended: dict[int, threading.Event] = {}
        self._listening = True
        self._folder = ""
        self._link, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(__file__).parents[2])
        arguments = (server_end.fileno(), level, tempfile.gettempdir(), json.dumps(package_folders))
        # A fresh interpreter with an empty environment: a fork of this process would hand its memory to hostile code.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-c", _BOOT, package, *map(str, arguments)],
            env={"PYTHONHASHSEED": "0"},  # equal programs meet sets in equal order; -I would ignore it
            cwd="/",
            stdin=subprocess.DEVNULL,
            pass_fds=[server_end.fileno()],
            start_new_session=True,
        )
        server_end.close()
        self._link.settimeout(STARTUP_SECONDS)
        try:
            reply = self._receive()
        except TimeoutError:
            self.close()
            raise SandboxError(
                f"the sandbox server of level {level!r} did not start within {STARTUP_SECONDS:g} s; try again when the "
                "machine is less busy"
            ) from None
        if "ready" not in reply:
            self.close()
            raise LevelError(
                f"sandbox level {level!r} cannot be set up here: "
                f"{reply.get('failed', 'the server ended').strip().splitlines()[-1]}"
            )
        self._link.settimeout(None)
        self._folder = str(reply["folder"])
        threading.Thread(target=self._listen, name="sandbox-server", daemon=True).start()

    @property
    def alive(self) -> bool:
        """True if the server can open cells for this process."""
        return self.owner == os.getpid() and self._listening and self._process.poll() is None

    def open(self, settings: CellSettings, descriptors: list[int]) -> threading.Event:
        """Fork a child; the event is set when it and all that it started are gone.

        Raises:
            SandboxError: the server is gone.
        """
        ended = threading.Event()
        with self._lock:
            self._ended[settings.number] = ended
            try:
                message = json.dumps({"open": asdict(settings)}).encode()
                socket.send_fds(self._link, [message], descriptors)
            except OSError as error:
                raise SandboxError(f"the sandbox server is gone: {error}") from error
        return ended

    def kill(self, number: int, ended: threading.Event) -> None:
        """End a cell and remove its files; do nothing in a copy by fork, as the cell belongs to the parent.

        Raises:
            SandboxError: the cell does not end.
        """
        if self.owner != os.getpid():
            return
        for _ in range(KILL_SECONDS):  # second by second: a machine that stands still for a minute counts as one
            if not ended.is_set():
                self.abandon(number)
            if ended.wait(1.0):
                break
        else:
            raise SandboxError(
                f"cell {number} of the sandbox server does not end within {KILL_SECONDS} s; "
                f"the server and its cells, each with its state: {process_states(self._process.pid)}"
            )
        if self._folder:
            remove_tree(self.folder_of(number))

    def abandon(self, number: int) -> None:
        """Ask for a cell's end without waiting for it; its files are removed with the server's folder.

        Takes no lock, as it is called from the garbage collector, which may run while this thread holds it.
        """
        if self.owner == os.getpid():
            with suppress(OSError):  # a server that is gone has taken its cells with it
                self._link.send(json.dumps({"kill": number}).encode())

    def folder_of(self, number: int) -> str:
        """Return the private folder of a cell; empty where it lives in memory."""
        return f"{self._folder}/{number}" if self._folder else ""

    def close(self) -> None:
        """End the server and all its cells; may be called twice."""
        if self.owner != os.getpid():
            return  # a copy by fork: the server belongs to the parent
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._folder:
            with suppress(OSError):  # a cell that is closed at the same time removes its part
                remove_tree(self._folder)  # which a server that was killed could not

    def _receive(self) -> dict[str, Any]:
        """Return the next message; an empty one when the server has ended."""
        try:
            text = self._link.recv(MAX_MESSAGE)
        except ConnectionResetError:
            return {}
        return json.loads(text) if text else {}

    def _listen(self) -> None:
        try:
            while message := self._receive():
                with self._lock:
                    ended = self._ended.pop(message.get("ended", -1), None)
                if ended is not None:
                    ended.set()
        finally:  # a server without a listener ends with its cells, and the next cell has a new server
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._listening = False
                events, self._ended = list(self._ended.values()), {}
            for ended in events:
                ended.set()


_ServerKey = tuple[IsolationName, tuple[str, ...]]
_servers: dict[_ServerKey, ServerProcess] = {}
_refused: dict[_ServerKey, str] = {}
"""Reasons of kinds that cannot be set up: each further request would start a process, and others would wait."""

_lock = threading.Lock()


def server(level: IsolationName, packages: tuple[str, ...] = ()) -> ServerProcess:
    """Return the server of this process for a level and packages, started when there is none.

    Raises:
        LevelError: the machine does not offer the level, or a package cannot be loaded.
        SandboxError: the server does not start in time.
    """
    with _lock:
        key = (level, packages)
        if key in _refused:
            raise LevelError(_refused[key])
        process = _servers.get(key)
        if process is None or not process.alive:
            if process is not None:
                process.close()
            try:
                process = _servers[key] = ServerProcess(level, packages)
            except LevelError as error:
                _refused[key] = str(error)
                raise
        return process


def _package_folder(package: str) -> str:
    """Return the folder that a package of this interpreter is installed in.

    Raises:
        ConfigurationError: the package is not installed, or is not in a file system.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        raise ConfigurationError(f"sandbox.packages: there is no package {package!r} here; install it or leave it out")
    module = os.path.realpath(spec.origin)
    return os.path.dirname(os.path.dirname(module) if spec.submodule_search_locations else module)


def strongest() -> tuple[IsolationName, dict[IsolationName, str]]:
    """Return the strongest level that this machine offers, and why each stronger one is not.

    Raises:
        SandboxError: not even limits can be set, or a server does not start in time.
    """
    reasons: dict[IsolationName, str] = {}
    for level in reversed(STRENGTH):
        try:
            server(level)
        except LevelError as error:  # a late start is no reason to take a weaker level
            reasons[level] = str(error)
        else:
            return level, reasons
    raise SandboxError("; ".join(reasons.values()))


@atexit.register
def _close_all() -> None:
    for process in list(_servers.values()):
        process.close()


def _after_fork() -> None:
    """Forget all servers in a forked process; a thread that it does not have may have held the lock."""
    global _lock
    _lock = threading.Lock()
    for process in _servers.values():
        process._link.close()  # the servers end with their owner, not with the last copy of the link
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)
