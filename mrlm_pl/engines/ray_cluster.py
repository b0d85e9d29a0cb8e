"""A connection to Ray, started here or joined: room for workers, calls with deadlines, no process left behind."""

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any, Literal

from mrlm_pl.errors import ConfigurationError, EngineError

logger = logging.getLogger(__name__)

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

CHECK_SECONDS = 1.0
"""After which who waits for a worker looks whether the cluster is still there."""

_STOP_SECONDS = 20.0
_FOLDER, _LOCK = "mrlm-ray-", "in_use"
_OBJECT_STORE_BYTES = 128 * 2**20  # weights do not go through it
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class RayCluster:
    """Ray, as one process uses it.

    A Ray that is started here runs under a thread that lives as long as the process or until :meth:`close`: its
    processes follow that thread, so that none outlives a process that is killed (on Linux).

    Args:
        address: ``HOST:PORT`` of a cluster, ``auto`` for the one that this machine belongs to, None to start one here.
        cpus: the CPUs that a Ray that is started here says it has.
        seconds: that starting or joining may take.
        silence: seconds without an answer of the head after which it is given up.

    Raises:
        ConfigurationError: Ray is not installed.
        EngineError: there is no such cluster, or it does not answer in time.
    """

    def __init__(self, address: str | None, cpus: float, seconds: float = 120.0, silence: float = 10.0) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)  # read when Ray is imported and started
        excepthook = sys.excepthook
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "a pool of workers needs Ray, which is not installed; `pip install 'mrlm[ray]'`"
            ) from error
        # Ray's reports to the head before it prints anything: the error of a head that is gone would never be seen.
        sys.excepthook = excepthook
        self._ray: Any = ray
        self._asked, self._cpus, self._silence = address, cpus, silence
        self._silent_since: float | None = None
        self._answered: float | None = None
        self._looking = threading.Lock()
        self._stop, self._ready = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._folder: Path | None = None
        self._group: Any = None
        self._own: list[Any] = []
        self._below: set[Any] = set()
        self.address = address or "this machine"
        self._joined = ray.is_initialized()  # somebody else's, who also ends it
        if self._joined:
            self._look_around()
            return
        self._thread = threading.Thread(target=self._live, name="mrlm-ray", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        if not self._ready.wait(seconds):
            self._stop.set()
            raise EngineError(f"Ray at {self.address} did not answer within {seconds:g} s; {self._remedy()}")
        if self._failure is not None:
            raise EngineError(f"Ray at {self.address} cannot be used: {self._failure}; {self._remedy()}")

    def _remedy(self) -> str:
        if self._asked is None:
            return "look at the free memory and at /dev/shm"
        return (
            "start it with `ray start --head`; if it wants a token, set RAY_AUTH_MODE=token for the run as well; or "
            "leave the address out to start Ray on this machine"
        )

    def _live(self) -> None:
        """Start Ray, wait, end it; in a thread of its own."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "mrlm"}
        try:
            if self._asked is None:
                self._folder, self._lock = _own_folder()
                options |= {
                    "address": "local",
                    "num_cpus": max(1, math.ceil(self._cpus)),
                    "include_dashboard": False,
                    "object_store_memory": _OBJECT_STORE_BYTES,
                    "_temp_dir": str(self._folder),
                }
            else:
                host, _, port = self._asked.rpartition(":")
                if port.isdigit():
                    socket.create_connection((host, int(port)), timeout=_STOP_SECONDS).close()  # Ray would try for long
                options["address"] = self._asked
            self._ray.init(**options)
            self._look_around()
        except BaseException as error:
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        self._stop.wait()
        if not self._broken():
            self._ray.shutdown()

    def _look_around(self) -> None:
        self.address = self._ray.get_runtime_context().gcs_address
        self.host = self._ray.util.get_node_ip_address()
        node = self._ray._private.worker._global_node
        if self._asked is None and not self._joined:
            self._own = [item.process for items in node.all_processes.values() for item in items]
            self._note_children()

    def _note_children(self) -> None:
        """Remember what the processes that were started here have started, as long as they can be asked."""
        import psutil  # comes with Ray

        for process in self._own:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._below |= set(psutil.Process(process.pid).children(recursive=True))

    # What may be asked while it runs.

    def reserve(self, bundles: Sequence[dict[str, float]], strategy: Strategy, seconds: float) -> None:
        """Reserve room for the workers, a bundle of resources each; all of it or none.

        Raises:
            EngineError: the cluster has no such room, or not in time.
        """
        wanted = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
        self._group = self._ray.util.placement_group(wanted, strategy=strategy)
        if not self._group.wait(seconds):
            total = {name: amount for name, amount in self._ray.cluster_resources().items() if name in ("CPU", "GPU")}
            free = {name: self._ray.available_resources().get(name, 0.0) for name in total}
            raise EngineError(
                f"Ray at {self.address} could not reserve {wanted} ({strategy}) within {seconds:g} s; it has {total}, "
                f"of which {free} are free; ask for fewer workers or less for each, or add machines"
            )
        self._note_children()

    def actor(self, cls: type, bundle: int, arguments: Sequence[Any], calls: int, resources: dict[str, float]) -> Any:
        """A new actor of the class in a reserved bundle; it has not answered yet.

        Raises:
            EngineError: the cluster is gone.
        """
        while self._broken():  # Ray would wait for its head without a word, and then end this process
            self.check()
            time.sleep(CHECK_SECONDS / 4)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        remote = self._ray.remote(cls).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=calls,
            scheduling_strategy=placed,
        )
        return remote.remote(*arguments)

    def kill(self, actor: Any) -> None:
        """End an actor without waiting for it."""
        if not self._broken():
            self._ray.kill(actor, no_restart=True)

    def end(self, actors: Sequence[Any], seconds: float) -> None:
        """Give actors some seconds to close what they have, and end them."""
        if not self._broken():
            wait([self.call(actor, "close") for actor in actors], timeout=seconds)
        for actor in actors:
            self.kill(actor)

    def call(self, actor: Any, method: str, *arguments: Any) -> Future[Any]:
        """The future of what a method of an actor returns; its error is one for :meth:`translated`."""
        return getattr(actor, method).remote(*arguments).future()

    def wait(self, future: Future[Any], seconds: float, who: str, does: str) -> Any:
        """The result of a :meth:`call`.

        Raises:
            WorkerLostError: the actor is dead, or did not answer in time.
            EngineError: the cluster is gone.
            Exception: what the actor raised.
        """
        deadline = time.monotonic() + seconds
        while not wait([future], timeout=max(0.0, min(CHECK_SECONDS, deadline - time.monotonic()))).done:
            self.check()
            if time.monotonic() > deadline:
                raise WorkerLostError(f"{who} did not {does} within {seconds:g} s")
        try:
            return future.result()
        except Exception as error:
            raise self.translated(error, who, does) from error

    def translated(self, error: Exception, who: str, does: str) -> Exception:
        """An error of Ray as ours: what the actor raised, or that it is lost, or that the cluster is.

        Raises:
            EngineError: the cluster is gone.
        """
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            return error.cause if isinstance(error.cause, Exception) else EngineError(f"{who}: {error}")
        if isinstance(error, exceptions.RayError):
            self.check()
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return WorkerLostError(f"{who} is gone while it should {does} ({type(error).__name__}: {reason[0]})")
        return error

    def check(self) -> None:
        """Nothing, as long as the head of the cluster answers.

        Raises:
            EngineError: it has been silent for too long.
        """
        with self._looking:  # who waits for many calls asks from many threads
            now = time.monotonic()
            fresh = self._answered is not None and now - self._answered < CHECK_SECONDS / 2
            if fresh and not self._ended():
                return
            if not self._broken():
                self._answered, self._silent_since = time.monotonic(), None
                return
            self._answered = None
            self._silent_since = since = self._silent_since or now
        if self._own or now - since >= self._silence:
            raise self.lost()

    def lost(self) -> EngineError:
        """The error of a cluster that is gone."""
        what = "was started here and has died" if self._own else f"has not answered for {self._silence:g} s"
        return EngineError(
            f"Ray at {self.address} {what}: the workers of the pool cannot be reached or replaced. Start it again if "
            "it is not started by the run itself; `--ckpt_path last` goes on from the last checkpoint"
        )

    def _ended(self) -> bool:
        return any(process.poll() is not None for process in self._own)

    def _broken(self) -> bool:
        """Whether a process that was started here has ended, or the head takes no connection."""
        if self._ended():
            return True
        host, _, port = str(self.address).rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Give back what was reserved; end a Ray that was started here and wait for it. May be called twice."""
        group, self._group = self._group, None
        if group is not None and not self._broken():
            _within(_STOP_SECONDS, lambda: self._ray.util.remove_placement_group(group))
        if self._joined or self._stop.is_set():
            return
        self._note_children()
        self._stop.set()
        atexit.unregister(self.close)
        self._thread.join(_STOP_SECONDS)
        self._end_processes()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    def _end_processes(self) -> None:
        """End what is left of the processes that were started here."""
        import psutil

        for process in self._own:
            if process.poll() is None:
                process.kill()
            process.wait(_STOP_SECONDS)
        for process in self._below:
            with contextlib.suppress(psutil.NoSuchProcess):  # most have gone by themselves
                process.kill()
        psutil.wait_procs(self._below, timeout=_STOP_SECONDS)


class WorkerLostError(EngineError):
    """A worker is dead or does not answer; another one can take its place."""


def _within(seconds: float, function: Callable[[], Any]) -> bool:
    """Run a function that may hang in a thread of its own; whether it ended in time."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _own_folder() -> tuple[Path, IO[str]]:
    """A new folder for Ray's files and the lock that says that it is used; those of killed runs are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with contextlib.suppress(OSError), old.open("a") as lock:  # somebody else's, or in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    lock = (folder / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock
