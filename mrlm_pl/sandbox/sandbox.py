"""The sandbox's interface: run Python, run a shell, or grade a program, isolated and within limits."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any

from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.sandbox.host.cell import Cell, Ending
from mrlm_pl.sandbox.host.server_process import STARTUP_SECONDS, ServerProcess, server, strongest
from mrlm_pl.sandbox.inside.candidate import SHELL_TIMED_OUT
from mrlm_pl.sandbox.wall.confinement import HOME, CellSettings
from mrlm_pl.sandbox.wall.isolation import STRENGTH, IsolationName
from mrlm_pl.settings import PositiveFloat, PositiveInt, Settings, at_least

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """The result of running a program.

    Args:
        output: printed text, including standard error, at most ``output_kb`` KiB.
        cut: whether a part of the output was discarded.
        error: the error that ended it, as Python prints it; None without one.
        ending: reason why it was ended, or None: ``time``, ``output``, ``memory``, ``disk``, ``exit``, ``protocol``.
        status: exit status of a shell script.
        seconds: wall time in seconds.
        isolation: isolation level of the run.
    """

    output: str
    cut: bool
    error: str | None
    ending: Ending | None
    status: int | None
    seconds: float
    isolation: IsolationName


@dataclass(frozen=True)
class Sandbox(Settings):
    """Runs untrusted programs. Copies and threads share one server process for each level.

    The strongest level that the machine offers is used, logged, and named in every result: ``namespaces``,
    ``landlock`` or ``limits``.

    Args:
        minimum: weakest acceptable level; a machine that offers only a weaker one raises an error.
        level: required level, instead of the strongest one.
        wall_seconds: wall time of a program, from its start to its end.
        memory_mb: memory of a program, in MiB.
        disk_mb: size of its private folder, in MiB.
        output_kb: maximum output of a program that is kept, in KiB.
        packages: packages that programs may import beyond the standard library, such as ``numpy``, by their import
            names. Their code, native code included, then runs inside, and the folder that they are installed
            in can be read; see docs/environments/sandbox.md.

    Raises:
        ConfigurationError: a value is out of range.
    """

    minimum: IsolationName = "limits"
    level: IsolationName | None = None
    wall_seconds: PositiveFloat = 5.0
    memory_mb: Annotated[int, at_least(64)] = 512
    disk_mb: PositiveInt = 64
    output_kb: PositiveInt = 64
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", tuple(sorted(set(self.packages))))
        if self.level and STRENGTH[self.level] < STRENGTH[self.minimum]:
            raise ConfigurationError(
                f"sandbox.level is {self.level!r}, which is weaker than sandbox.minimum, {self.minimum!r}; lower the "
                "minimum or leave the level out"
            )

    @property
    def isolation(self) -> IsolationName:
        """The level that programs run at.

        Raises:
            ConfigurationError: the machine does not offer the minimum, or one of ``packages`` is not installed.
            SandboxError: the machine does not offer the required level, or no level at all.
        """
        return self._server_process().level

    def _server_process(self) -> ServerProcess:
        if self.level is not None:
            return server(self.level, self.packages)
        level, reasons = _strongest_level()
        if STRENGTH[level] < STRENGTH[self.minimum]:
            raise ConfigurationError(
                f"sandbox.minimum is {self.minimum!r}, but this machine offers only {level!r} "
                f"({'; '.join(reasons.values())}); allow user namespaces (sysctl user.max_user_namespaces, and in a "
                "container seccomp and AppArmor profiles that let unshare pass), serve the environment from a machine "
                "that has them, or lower sandbox.minimum"
            )
        return server(level, self.packages)

    def open(self, *, shell: bool = False, requests: int = 1) -> Cell:
        """Return a locked-down child that answers requests; close it.

        Args:
            shell: whether it runs scripts.
            requests: number of requests of full length for which its CPU time suffices; scripts have their own.

        Raises:
            ConfigurationError: one of ``packages`` is not installed.
            SandboxError: the child cannot be made.
        """
        server_process = self._server_process()
        settings = CellSettings(
            number=next(server_process.numbers),
            memory_mb=self.memory_mb,
            cpu_seconds=math.ceil(self.wall_seconds * requests) + 1,
            disk_mb=self.disk_mb,
            shell=shell,
            folders=server_process.folders,
        )
        return Cell(server_process, settings, self.output_kb * 1024)

    def run(self, source: str) -> Execution:
        """Run a Python program in a fresh child; the value of a last expression is printed.

        >>> Sandbox().run("print('hello'); 2 + 2").output
        'hello\\n4\\n'
        """
        with running(), self.open() as cell:
            return self.execute(cell, {"operation": "run", "source": source})

    def shell(self, script: str) -> Execution:
        """Run a ``bash`` script in a fresh child.

        >>> Sandbox().shell("echo $((6 * 7)); exit 3").status
        3
        """
        with running(), self.open(shell=True) as cell:
            return self.script(cell, script)

    def script(self, cell: Cell, script: str) -> Execution:
        """Run a ``bash`` script in an open cell, which keeps the files of earlier scripts."""
        in_namespaces = cell.server.level == "namespaces"
        message = {
            "operation": "shell",
            "script": script,
            "seconds": self.wall_seconds,
            "folder": HOME if in_namespaces else cell.server.folder_of(cell.settings.number),
            "own_group": in_namespaces,
        }
        # The child ends a script at its time and lives on; should it not answer, it is ended itself.
        execution = self.execute(cell, message, grace=0.5)
        if execution.status == SHELL_TIMED_OUT and execution.seconds >= self.wall_seconds:
            return replace(execution, ending="time")
        return execution

    def copy_files(self, source: Cell, target: Cell) -> bool:
        """Make the private folders of a system hold those of another one; both need namespaces.

        False, with nothing copied, where that is more than 32 MiB, or 4 MiB packed.

        Raises:
            SandboxError: one of them has ended.
        """
        deadline = time.monotonic() + STARTUP_SECONDS
        reply = source.request({"operation": "pack", "root": "/"}, deadline)
        if reply.get("kind") == "ValueError":
            return False
        if "ok" in reply:
            reply = target.request({"operation": "unpack", "root": "/", "text": reply["ok"]}, deadline)
        if ending := source.ending or target.ending:
            raise SandboxError(f"a system ended while its files were copied ({ending})")
        if "error" in reply:
            raise SandboxError(f"files of a system cannot be copied: {reply['error']}")
        return True

    def execute(self, cell: Cell, message: dict[str, Any], grace: float = 0.0) -> Execution:
        """Run a request in an open cell."""
        started = time.monotonic()
        reply = cell.request(message, started + self.wall_seconds + grace)
        seconds = time.monotonic() - started
        if cell.ending is not None:
            cell.close()
        output, cut = cell.output()
        error = str(reply["error"]) if "error" in reply else None
        status = reply.get("ok") if isinstance(reply.get("ok"), int) else None
        return Execution(output, cut, error, cell.ending, status, seconds, cell.server.level)


_slots: threading.BoundedSemaphore


def _make_slots() -> None:
    """Make slots, and others in a forked process: the threads that would release these are not in it."""
    global _slots
    _slots = threading.BoundedSemaphore(max(os.cpu_count() or 2, 2))


_make_slots()
os.register_at_fork(after_in_child=_make_slots)


def running() -> AbstractContextManager[Any]:
    """Wait for a processor: with more concurrent programs than processors, their time limits would mean nothing."""
    return _slots


@cache
def _strongest_level() -> tuple[IsolationName, dict[IsolationName, str]]:
    """Return what :func:`strongest` finds, looked for once and logged."""
    level, reasons = strongest()
    for reason in reasons.values():
        logger.warning("%s", reason)
    if level == "namespaces":
        logger.info("untrusted code runs at sandbox level %r", level)
    else:
        logger.warning("untrusted code runs at sandbox level %r only; see docs/environments/sandbox.md", level)
    return level, reasons
