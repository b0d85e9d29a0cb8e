"""The state of a run, which the run writes to its folder, and the lock of the process that trains it; no torch."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mrlm_pl.durable_files import write_json
from mrlm_pl.errors import ConfigurationError, moved, writing

STATE = "state.json"
LOCK = ".lock"
LIBRARIES = ("mrlm", "torch", "transformers", "lightning")
STOPPED = "stopped without an end"
SIGN_SECONDS = 10.0
"""Time between two signs of life."""

SILENT_SECONDS = 600.0
"""A run that this process cannot see has stopped if it gives no sign of life for longer."""


class Training:
    """The training of a run by this process: a lock on its folder, then signs of life in :data:`STATE`, then its end.

    The file system may not support locks; then there is no lock.

    Args:
        folder: run folder.

    Attributes:
        precision: precision of the run's updates, as Lightning names it; its owner sets it once there is one.
        former: state of the run before this training.

    Raises:
        ConfigurationError: another process trains the run, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing("output", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("a")
        if not try_lock(self._lock.fileno()):
            self._lock.close()
            raise in_use(folder)
        self._ended = threading.Event()
        self._signs: threading.Thread | None = None
        self.precision = precision_in(folder)
        self.former = state_in(folder)[0]

    def begin(self) -> None:
        """Write that this process trains the run, and a sign of life every :data:`SIGN_SECONDS` from now on."""
        record = running()

        def sign() -> None:
            while not self._ended.wait(SIGN_SECONDS):
                self._write(record)

        self._write(record)
        self._signs = threading.Thread(target=sign, name="mrlm-signs-of-life", daemon=True)
        self._signs.start()

    def end(self, state: str, reason: str = "") -> None:
        """Write how the run ended, if it began."""
        if self._signs is not None:
            self._ended.set()
            self._signs.join()
            self._write({"state": state, "reason": reason})

    def check_folder(self) -> None:
        """Validate that the folder is in its place, before the run makes another one there by a write.

        Raises:
            StorageError: it is not.
        """
        if not (self._folder / LOCK).exists():
            raise moved(self._folder)

    def _write(self, record: Mapping[str, Any]) -> None:
        if os.path.exists(self._folder / LOCK):  # False, too, where the file system does not answer
            write_state(self._folder, {**record, "precision": self.precision})

    def release(self) -> None:
        """Release the lock, which forked processes have too."""
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()


def in_use(folder: Path) -> ConfigurationError:
    """Return the error for a run that another process trains."""
    remedy = "wait for its end, end it, or name another `output`"
    return ConfigurationError(f"output: another process trains the run {str(folder)!r}; {remedy}")


def in_training(folder: Path) -> bool:
    """Return whether a process holds the lock of a run."""
    return is_locked(folder / LOCK)


def is_locked(file: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    try:
        with file.open("a" if os.access(file, os.W_OK) else "r") as lock:
            return not try_lock(lock.fileno())
    except OSError:  # there is none
        return False


def try_lock(descriptor: int) -> bool:
    """Lock a file for this process; return False if another one has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # other errors are of a file system without locks
    return True


def running() -> dict[str, Any]:
    """Return the record of a run that this process trains."""
    return {
        "state": "running",
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "process": os.getpid(),
        "began": _start_time(os.getpid()),
    }


@functools.cache  # a run signs often, and an installation meanwhile does not change its libraries
def installed_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that decide a run's results."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def write_state(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a state, with the versions of the libraries and the time as its sign of life."""
    with suppress(OSError):  # a full disk ends the run where it writes its results
        write_json(folder / STATE, {**record, "versions": installed_versions(), "alive": time.time()})


def state_in(folder: Path) -> tuple[str, str]:
    """Return the state that a run has written to its folder; see :func:`state_of`."""
    path = folder / STATE
    return state_of(path.read_text(encoding="utf-8") if path.is_file() else "")


def precision_in(folder: Path) -> str:
    """Return the precision of a run's training, as Lightning names it; ``32-true`` where the run has not written it."""
    try:
        return str(json.loads((folder / STATE).read_text(encoding="utf-8"))["precision"])
    except (OSError, ValueError, LookupError, TypeError):
        return "32-true"


def state_of(text: str) -> tuple[str, str]:
    """Return the state in the content of :data:`STATE`, with its reason.

    The states are ``running``, ``finished``, ``interrupted`` by a signal, ``failed``, :data:`STOPPED` for a run whose
    process is gone, and ``unknown``.
    """
    try:
        record = json.loads(text)
        if record["state"] != "running":
            return str(record["state"]), str(record.get("reason", ""))
        return ("running" if _is_alive(record) else STOPPED), ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return "unknown", f"the run has no {STATE} that can be read"


def _is_alive(record: Mapping[str, Any]) -> bool:
    if (record["host"], record["namespace"]) != (socket.gethostname(), _namespace()):
        return time.time() - float(record["alive"]) < SILENT_SECONDS
    with suppress(PermissionError):  # another user's process
        try:
            os.kill(int(record["process"]), 0)
        except ProcessLookupError:
            return False
    return bool(record["began"] == _start_time(int(record["process"])))


def _namespace() -> str:
    """Return the name space of process numbers, which a container has of its own; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(process: int) -> str:
    """Return the start of a process in ticks since boot, which differs for a later one of its number.

    Empty where the system does not say; ``dead`` for one that has ended but that its parent has not waited for.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")  # its name may end within a character
        fields = stat.rpartition(")")[2].split()
        return "dead" if fields[0] in "ZX" else fields[19]
    except OSError:
        return ""
