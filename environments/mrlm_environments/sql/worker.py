"""SQLite in processes that can be killed, so that the time limit of a statement holds in every state of SQLite.

A few worker processes hold the databases of all episodes and execute one statement at a time. A worker ends itself
with a timer when a statement outlives its limit, also within a native function. Databases that it held are filled
again in another worker, from the task's tables and the statements that have changed them.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from mrlm_environments.sql.database import MemoryDatabase, Table
from mrlm_environments.sql.dialect import SqlError
from mrlm_pl.errors import DataError, MRLMError

MAX_PROCESS_MEMORY = 1024 * 1024 * 1024
"""Bytes of address space of a worker: for SQLite's memory, Python, and the texts that a statement makes."""

OPEN_SECONDS = 60.0
"""For starting a worker and filling a database with the task's tables."""

TIMER_SECONDS = 0.25
"""Seconds after its limit at which a statement ends its worker."""

WATCH_SECONDS = 5.0
"""Seconds after its limit at which a worker that has not ended itself, because it was stopped, is killed."""

MAX_ANSWER = 1 << 20
"""Bytes of a worker's answer: a shown result is shorter than :data:`~mrlm_environments.sql.database.SHOWN_CHARACTERS`
characters and a row."""

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from mrlm_environments.sql import worker; "
_START += "worker.serve(int(sys.argv[1]))"
_LOST = "the tables are lost: an earlier change takes too long to be made again"


class SqliteDatabase:
    """SQLite in memory, in a worker process, that reads MySQL's statements.

    Args:
        tables: the task's tables; all columns hold text.
        seconds: deadline of a statement.

    Raises:
        DataError: SQLite cannot hold the tables.
        MRLMError: no worker process can be started.
    """

    def __init__(self, tables: Sequence[Table], seconds: float) -> None:
        self._tables, self._seconds = [dict(table) for table in tables], seconds
        self._changes: list[str] = []
        self._lost = False
        self._number = next(_NUMBERS)
        self._leave = weakref.finalize(self, self._worker.databases.discard, self._number)
        with self._filled():
            pass

    def execute(self, query: str) -> str:
        """Execute one statement; return its rows as a list of tuples, or the number of rows that it changed.

        Raises:
            SqlError: the statement is rejected or fails.
        """
        with self._filled() as worker:
            shown, changes = worker.ask(self._seconds, "execute", self._number, query)
        if changes:
            self._changes.append(query)
        return str(shown)

    def state(self, tables: Sequence[Table]) -> str:
        """See :meth:`MemoryDatabase.state`."""
        with self._filled() as worker:
            return str(worker.ask(self._seconds, "state", self._number, [dict(table) for table in tables]))

    def close(self) -> None:
        """See :meth:`MemoryDatabase.close`."""
        self._leave()

    @property
    def _worker(self) -> _Worker:
        return _WORKERS[self._number % len(_WORKERS)]

    @contextmanager
    def _filled(self) -> Iterator[_Worker]:
        """Hold the worker for one statement; it has the database in it."""
        if self._lost:  # the agent's doing, so an answer to the agent and no failure of the episode
            raise SqlError(_LOST)
        with self._worker.lock:
            self._worker.start()
            if self._number not in self._worker.databases:
                self._worker.databases.add(self._number)
                try:
                    self._worker.ask(OPEN_SECONDS, "open", self._number, self._tables)
                    for change in self._changes:
                        self._worker.ask(self._seconds, "execute", self._number, change)
                except SqlError as error:
                    self._lost = True
                    raise SqlError(_LOST) from error
            yield self._worker


class _Worker:
    """A process that holds databases, started when it is needed. Hold the lock to ask it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.databases: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process if there is none, or it has ended with all its databases.

        Raises:
            MRLMError: it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.databases.clear()
        self._pipe, worker_end = Pipe()
        command = [sys.executable, "-I", "-c", _START, str(worker_end.fileno()), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[worker_end.fileno()], start_new_session=True
            )
        except OSError as error:
            raise MRLMError(f"sql: no process for SQLite can be started: {error}") from error
        finally:
            worker_end.close()

    def ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Return the process's answer.

        Raises:
            SqlError: the statement failed, or has ended the process.
            DataError: the tables cannot be held.
        """
        try:
            self._pipe.send_bytes(json.dumps([seconds, list(self.databases.copy()), method, *arguments]).encode())
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

    def stop(self) -> int | None:
        """Kill the process if it runs; return the status with which it ended."""
        if self._process is None:
            return None
        try:
            self._process.wait(0.2)  # a process that has closed its pipe is about to exit
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._pipe.close()
        return self._process.wait()


_NUMBERS = itertools.count()
_WORKERS = [_Worker() for _ in range(min(4, os.cpu_count() or 1))]


@atexit.register
def _stop() -> None:
    for worker in _WORKERS:
        worker.stop()


def _forget() -> None:
    """Replace the workers in a forked process: they are the parent's."""
    _WORKERS[:] = [_Worker() for _ in _WORKERS]


os.register_at_fork(after_in_child=_forget)


def serve(descriptor: int) -> None:
    """Answer requests in a worker process until the pipe is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable()  # sqlglot's warnings hold the agent's text, and would be printed on the trainer's terminal
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_PROCESS_MEMORY, MAX_PROCESS_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Connection(descriptor)
    databases: dict[int, MemoryDatabase] = {}
    while True:
        try:
            seconds, held, method, number, *arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        for gone in databases.keys() - held:
            databases.pop(gone).close()
        signal.setitimer(signal.ITIMER_REAL, seconds + TIMER_SECONDS)
        try:
            answer: list[Any] = ["ok", None]
            if method == "open":
                databases[number] = MemoryDatabase(*arguments)
            else:
                answer = ["ok", getattr(databases[number], method)(*arguments)]
        except SqlError as error:
            answer = ["fault", str(error)]
        except DataError as error:
            answer = ["data", str(error)]
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(json.dumps(answer).encode())
