"""The Ray of this process, started here or joined, for all its pools; it leaves no process behind."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import IO, Any

from mrlm_pl.concurrency.calls import in_daemon
from mrlm_pl.engines.ray.gpus import GpuLedger
from mrlm_pl.errors import ConfigurationError, EngineError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Interval of checks of the cluster while a worker is waited for."""

STOP_SECONDS = 20.0
_FOLDER, _LOCK = "mrlm-ray-", "in_use"
_OBJECT_STORE_BYTES = 128 * 2**20  # weights do not go through it
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it kills a run 3 s after SIGTERM, and its end leaves no handler at all
}
_START_VARIABLE = "RAY_raylet_start_wait_time_s"  # Ray's own is too short for a machine that is busy
_CPUS = 1024
"""CPUs of a Ray that is started here: the user decides what its pools take, and further pools may come."""


class RayConnection:
    """The Ray of one process; :meth:`shared` returns the current one.

    A Ray that is started here runs under a thread that lives as long as the process, or until the last pool is closed:
    its processes end with that thread, so that none outlives a killed process (on Linux).

    Args:
        address: ``HOST:PORT`` of a cluster, ``auto`` for this machine's, None to start one here.
        seconds: deadline of starting or joining.

    Attributes:
        address: ``HOST:PORT`` of its head.
        host: address of this process for other processes.
        started_here: whether this process started Ray.
        gpus: GPUs of this machine for the workers of a Ray that was started here.

    Raises:
        ConfigurationError: Ray is not installed, or the process has joined another one.
        EngineError: there is no such cluster, or it does not answer in time.
    """

    _current: RayConnection | None = None
    _sharing = threading.Lock()

    def __init__(self, address: str | None, seconds: float) -> None:
        settings = _SETTINGS if address is not None else {**_SETTINGS, _START_VARIABLE: str(math.ceil(seconds))}
        for name, value in settings.items():
            os.environ.setdefault(name, value)  # read when Ray is imported and started
        excepthook = sys.excepthook
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "a pool of workers needs Ray, which is not installed; `pip install 'mrlm[ray]'`"
            ) from error
        # Ray's hook reports to the head before it prints; without a head the error would never be seen.
        sys.excepthook = excepthook
        self.ray: Any = ray
        self.asked, self.gpus, self._users = address, GpuLedger(), 0
        self._silent_since: float | None = None
        self._answered = -math.inf
        self._looking = threading.Lock()
        self._stop, self._ready = threading.Event(), Future[None]()
        self._folder: Path | None = None
        self._own: list[Any] = []
        self._noted: set[Any] = set()
        self.address, self.host = address or "this machine", ""
        self._joined = ray.is_initialized()  # by other code, which also ends it
        self.started_here = address is None and not self._joined
        if self._joined:
            self._look_around()
            if address not in (None, "auto", self.address):
                raise ConfigurationError(
                    f"Ray at {address} is asked for, but this process has joined Ray at {self.address} already; leave "
                    "the address out to use that, or call `ray.shutdown()` before the run"
                )
            return
        self._life = in_daemon(self._live)
        atexit.register(self.close)
        if not wait([self._ready, self._life], seconds, FIRST_COMPLETED).done:
            self._stop.set()
            raise EngineError(f"Ray at {self.address} did not answer within {seconds:g} s; {self._remedy()}")
        if not self._ready.done():
            raise EngineError(f"Ray at {self.address} cannot be used: {self._life.exception()}; {self._remedy()}")

    @classmethod
    def shared(cls, address: str | None, seconds: float) -> RayConnection:
        """Return the connection of this process, made if necessary; each caller calls :meth:`give_back` once.

        Raises:
            ConfigurationError: the current one has another address: a process can use one Ray.
            EngineError: see the class.
        """
        with cls._sharing:
            current = cls._current
            if current is None:
                current = cls._current = cls(address, seconds)
            elif current.asked != address:
                raise ConfigurationError(
                    f"a pool of this process uses Ray at {current.asked or 'this machine'}, another asks for "
                    f"{address or 'this machine'}; a process can use one Ray: give both the same address"
                )
            current._users += 1
            return current

    def give_back(self) -> None:
        """End the connection, and a Ray that was started here, with its last user."""
        with self._sharing:
            self._users -= 1
            if not self._users:
                self.close()

    def _remedy(self) -> str:
        if self.asked is None:
            return (
                "check the load of the processors, the free memory and /dev/shm; on a busy machine raise "
                "deadlines.start"
            )
        return (
            "start it with `ray start --head`; if it wants a token, set RAY_AUTH_MODE=token for the run as well; or "
            "leave the address out to start Ray on this machine"
        )

    def _live(self) -> None:
        """Start Ray, wait, end it; runs in its own thread."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "mrlm"}
        if self.asked is None:
            self._folder, self._lock = _own_folder()
            options |= {
                "address": "local",
                "num_cpus": _CPUS,
                "num_gpus": 0,  # the ledger assigns them: it knows the learner's
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": str(self._folder),
                "_system_config": {"prestart_worker_first_driver": False},  # a process for each CPU otherwise
            }
        else:
            host, _, port = self.asked.rpartition(":")
            if port.isdigit():
                # Ray would retry for long.
                socket.create_connection((host, int(port)), timeout=STOP_SECONDS).close()
            options["address"] = self.asked
        self.ray.init(**options)
        self._look_around()
        self._ready.set_result(None)
        self._stop.wait()
        if not self.broken():
            self.ray.shutdown()

    def _look_around(self) -> None:
        self.address = self.ray.get_runtime_context().gcs_address
        self.host = self.ray.util.get_node_ip_address()
        node = self.ray._private.worker._global_node
        if self.started_here:
            self._own = [info.process for infos in node.all_processes.values() for info in infos]
            self.note_children()

    def note_children(self) -> None:
        """Note the processes that were started here and their children, while they run."""
        import psutil  # comes with Ray

        for process in self._own:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    top = psutil.Process(process.pid)
                    self._noted |= {top, *top.children(recursive=True)}

    def check(self, silence: float) -> None:
        """Check that the head of the cluster answers.

        Args:
            silence: seconds without an answer until the cluster counts as gone.

        Raises:
            EngineError: the head has been silent for too long.
        """
        with self._looking:  # calls check from many threads
            now = time.monotonic()
            if now - self._answered < CHECK_SECONDS / 2 and not self._has_ended():
                return
            if not self.broken():
                self._answered, self._silent_since = time.monotonic(), None
                return
            self._silent_since = since = self._silent_since or now
        if self._own or now - since >= silence:
            what = "was started here and has died" if self._own else f"has not answered for {silence:g} s"
            raise EngineError(
                f"Ray at {self.address} {what}: the workers of the pool cannot be reached or replaced. Start it again "
                "unless the run itself starts it, and continue with `--ckpt_path last`"
            )

    def _has_ended(self) -> bool:
        return any(process.poll() is not None for process in self._own)

    def broken(self) -> bool:
        """Return whether a process that was started here has ended, or the head takes no connection."""
        if self._has_ended():
            return True
        host, _, port = str(self.address).rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
        except OSError:
            return True
        return False

    def close(self) -> None:
        """End a Ray that was started here, even if it is in use, and wait; may be called twice."""
        if RayConnection._current is self:
            RayConnection._current = None
        if self._joined or self._stop.is_set():
            return
        self.note_children()
        self._stop.set()
        atexit.unregister(self.close)
        ended = wait([self._life], STOP_SECONDS).done
        if self._ready.done() and ended and (error := self._life.exception()) is not None:
            logger.warning("Ray at %s did not shut down cleanly: %s", self.address, error)
        self._end_processes()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    def _end_processes(self) -> None:
        """Kill the remaining processes that were started here."""
        import psutil

        for process in self._noted:
            with contextlib.suppress(psutil.NoSuchProcess):  # most have ended by themselves
                process.kill()
        psutil.wait_procs(self._noted, timeout=STOP_SECONDS)


def _own_folder() -> tuple[Path, IO[str]]:
    """Return a new folder for Ray's files and the lock of its use; remove the folders of killed runs."""
    for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with contextlib.suppress(OSError), old.open("a") as lock:  # another user's, or in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    lock = (folder / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock
