"""SQLite in processes that can be killed, so that the time limit of a statement holds whatever SQLite is doing.

A few worker processes hold the databases of all episodes and execute one statement at a time. A worker ends itself
with a timer when a statement outlives its limit, also within a native function. Databases that it held are filled
again in another worker, from the task's tables and the statements that have changed them.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from mrlm_environments.sql.database import Database, MemoryDatabase, Table
from mrlm_environments.sql.dialect import SqlError
from mrlm_pl.errors import DataError, MRLMError

WORKERS = min(4, os.cpu_count() or 1)
MAX_PROCESS_MEMORY = 1024 * 1024 * 1024
"""Bytes of address space of a worker: what SQLite may hold, Python, and what a statement may make of texts."""

OPEN_SECONDS = 60.0
"""For starting a worker and filling a database with the task's tables."""

TIMER_SECONDS = 0.25
"""So long after its limit a statement that does not check the time ends its worker."""

WATCH_SECONDS = 5.0
"""So long after its limit a worker that has not ended itself, because it was stopped, is killed."""

MAX_ANSWER = 1 << 20
"""Bytes of a worker's answer: a shown result is shorter than :data:`~mrlm_environments.sql.database.SHOWN_CHARACTERS`
characters and a row."""

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from mrlm_environments.sql import worker; "
_START += "worker.serve(int(sys.argv[1]))"
_ATTEMPTS = 20
_LOST = "the tables are lost: an earlier change takes too long to be made again"


class SqliteDatabase(Database):
    """SQLite in memory, in a worker process, that reads MySQL's statements.

    Args:
        tables: the task's tables; all columns hold text.
        seconds: how long a statement may take.

    Raises:
        DataError: SQLite cannot hold the tables.
        MRLMError: no worker process can be started.
    """

    def __init__(self, tables: Sequence[Table], seconds: float) -> None:
        self._tables, self._seconds = [dict(table) for table in tables], seconds
        self._changes: list[str] = []
        self._lost = False
        self._worker: _Worker | None = None
        self._leave: weakref.finalize[..., SqliteDatabase] | None = None
        with self._home():
            pass

    def execute(self, query: str) -> str:
        """See :meth:`Database.execute`."""
        with self._home() as (worker, number):
            shown, changes = worker.ask(self._seconds, "execute", number, query)
        if changes:
            self._changes.append(query)
        return str(shown)

    def state(self, tables: Sequence[Table]) -> str:
        """See :meth:`Database.state`."""
        with self._home() as (worker, number):
            return str(worker.ask(self._seconds, "state", number, [dict(table) for table in tables]))

    def close(self) -> None:
        """See :meth:`Database.close`."""
        if self._leave is not None:
            self._leave()
        self._worker = self._leave = None

    @contextmanager
    def _home(self) -> Iterator[tuple[_Worker, int]]:
        """The worker that holds the database, for the time of one statement, and the database's number there."""
        if self._lost:  # the agent's doing, so an answer to the agent and no failure of the episode
            raise SqlError(_LOST)
        for _ in range(_ATTEMPTS):
            worker = self._worker if self._worker is not None and self._worker.alive else _POOL.take()
            with worker.lock:
                if not worker.alive:  # a statement of another episode has ended it
                    continue
                if worker is not self._worker:
                    self._enter(worker)
                yield worker, self._number
                return
        raise MRLMError("sql: the processes of SQLite end again and again; is there enough memory?")

    def _enter(self, worker: _Worker) -> None:
        """Fill a database in a worker with what this one holds."""
        self.close()
        self._number = worker.admit()
        self._leave = weakref.finalize(self, worker.dismiss, self._number)
        worker.ask(OPEN_SECONDS, "open", self._number, self._tables, self._seconds)
        try:
            for change in self._changes:
                worker.ask(self._seconds, "execute", self._number, change)
        except SqlError as error:
            self.close()
            self._lost = True
            raise SqlError(_LOST) from error
        self._worker = worker


class _Worker:
    """One process and the pipe to it; hold the lock to ask it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.databases: set[int] = set()
        self._numbers = itertools.count()
        self._dismissed: deque[int] = deque()
        self._owner = os.getpid()
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-I", "-c", _START, str(theirs.fileno()), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        except OSError as error:
            raise MRLMError(f"sql: no process for SQLite can be started: {error}") from error
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        """True if the worker takes requests; it belongs to the process that started it, not to forked ones."""
        return self._owner == os.getpid() and self._process.poll() is None

    def admit(self) -> int:
        """Return a number for a new database."""
        number = next(self._numbers)
        self.databases.add(number)
        return number

    def dismiss(self, number: int) -> None:
        """Release a database; the next request tells the worker, which may be busy now."""
        self.databases.discard(number)
        self._dismissed.append(number)

    def ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Return the worker's answer.

        Raises:
            SqlError: the statement failed, or has ended the worker.
            DataError: the tables cannot be held.
        """
        dismissed = [self._dismissed.popleft() for _ in range(len(self._dismissed))]
        try:
            self._pipe.send_bytes(json.dumps([seconds, dismissed, method, *arguments]).encode())
            if not self._pipe.poll(seconds + WATCH_SECONDS):
                raise EOFError
            kind, content = json.loads(self._pipe.recv_bytes(MAX_ANSWER))
        except (EOFError, OSError):
            code = self.stop()
            slow = code in (-signal.SIGALRM, -signal.SIGKILL)
            raise SqlError("the statement takes too long" if slow else f"the statement broke SQLite ({code})") from None
        if kind == "data":
            raise DataError(content)
        if kind == "fault":
            raise SqlError(content)
        return content

    def stop(self) -> int:
        """Kill the process if it runs; the status with which it ended."""
        try:
            self._process.wait(0.2)  # a worker that has closed its pipe is about to exit
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._pipe.close()
        return self._process.wait()


class _Pool:
    """The workers of this process; started when they are needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []

    def take(self) -> _Worker:
        """Return the worker with the fewest databases, a new one while there are fewer than :data:`WORKERS`."""
        with self._lock:
            self._workers = [worker for worker in self._workers if worker.alive]
            least = min(self._workers, key=lambda worker: len(worker.databases), default=None)
            if least is None or (least.databases and len(self._workers) < WORKERS):
                least = _Worker()
                self._workers.append(least)
            return least

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            if worker.alive:
                worker.stop()
        self._workers = []

    def forget(self) -> None:
        """In a forked process: the workers are the parent's."""
        self._lock, self._workers = threading.Lock(), []


_POOL = _Pool()
atexit.register(_POOL.close)
os.register_at_fork(after_in_child=_POOL.forget)


def serve(descriptor: int) -> None:
    """The worker's side: answer requests until the pipe is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_PROCESS_MEMORY, MAX_PROCESS_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Connection(descriptor)
    databases: dict[int, MemoryDatabase] = {}
    while True:
        try:
            seconds, dismissed, method, number, *arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        for gone in dismissed:
            if gone in databases:
                databases.pop(gone).close()
        signal.setitimer(signal.ITIMER_REAL, seconds + TIMER_SECONDS)
        try:
            answer: list[Any] = ["ok", None]
            if method == "open":
                databases[number] = MemoryDatabase(*arguments)
            elif method == "state":
                answer = ["ok", databases[number].state(*arguments)]
            else:
                answer = ["ok", (databases[number].execute(*arguments), databases[number].has_changed)]
        except SqlError as error:
            answer = ["fault", str(error)]
        except DataError as error:
            answer = ["data", str(error)]
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(json.dumps(answer).encode())
