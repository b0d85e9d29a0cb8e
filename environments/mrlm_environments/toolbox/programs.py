"""Tools that run an agent's code in the sandbox: a lasting Python session, and a shell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mrlm_pl.environment.tools import Tool, clip, tool_schema
from mrlm_pl.episode import Task
from mrlm_pl.sandbox import Cell, Execution, Sandbox, running

SOURCE = {"type": "string", "maxLength": 100_000}
"""The JSON schema of an argument that is run."""

OUTPUT_CHARACTERS = 2_000
SESSION_CALLS = 8
_ENDINGS = {
    "time": "it took too long",
    "output": "it printed too much",
    "memory": "it used too much memory",
    "disk": "it wrote too much",
    "exit": "its process ended",
    "protocol": "its process ended",
}


class CellHolder:
    """Holds a cell of the sandbox for an episode; a copy begins without one."""

    _cell: Cell | None = None

    def close(self) -> None:
        """End the cell; may be called twice."""
        if self._cell is not None:
            self._cell.close()
            self._cell = None

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and counters; a cell is not copied."""
        return {**self.__dict__, "_cell": None}


class _CellTool(CellHolder, Tool):
    """A tool with a cell, which it opens at its first call and keeps until the episode ends."""

    def __init__(self, sandbox: Sandbox = Sandbox()) -> None:  # noqa: B008 (frozen)
        self.sandbox = sandbox

    def tools(self) -> Sequence[Tool]:
        """Return the tool itself.

        Raises:
            ConfigurationError: the machine does not offer ``sandbox.minimum``.
            SandboxError: it offers no sandbox at all.
        """
        _ = self.sandbox.isolation  # a machine that cannot run programs so says it before the first episode
        return super().tools()

    def open(self, task: Task) -> None:
        """Begin with a fresh cell; see :meth:`Tool.open`."""
        self.close()

    def _run(self, execute: Callable[[Cell], Execution], loss: str, **options: Any) -> str:
        """Describe an execution in the cell, which is opened with these options, and closed if it has ended."""
        with running():
            if self._cell is None:
                self._cell = self.sandbox.open(**options)
            done = execute(self._cell)
        if self._cell.ending is None:
            return told(done)
        self.close()
        return told(done, loss)


class PythonRepl(_CellTool):
    """Runs lines of Python in a session that lasts for the episode; the value of a last expression is printed.

    Args:
        sandbox: sandbox that runs the session; ``wall_seconds`` is for each call, and the whole session has the
            processor time of eight calls of this length.
    """

    schema = tool_schema(
        "python_repl",
        "Run Python code in a session that remembers earlier calls. Returns what is printed and the last value.",
        {"code": SOURCE},
        closed=True,
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the code's output, the error that ended it, or the reason why the session was ended.

        Raises:
            SandboxError: the sandbox is broken.
        """
        message = {"operation": "run", "source": arguments["code"]}
        return self._run(
            partial(self.sandbox.execute, message=message), "The session begins anew.", requests=SESSION_CALLS
        )


class Shell(_CellTool):
    """Runs ``bash`` scripts. Files last for the episode where the sandbox has namespaces, else for the script.

    Args:
        sandbox: sandbox that runs the scripts; ``wall_seconds`` is for each.
    """

    schema = tool_schema(
        "shell",
        "Run a bash script. Returns what is printed and the exit status, if it is not 0.",
        {"script": SOURCE},
        closed=True,
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the script's output, its exit status, or the reason why it was ended.

        Raises:
            SandboxError: the sandbox is broken.
        """
        if self.sandbox.isolation != "namespaces":
            return told(self.sandbox.shell(arguments["script"]))
        return self._run(partial(self.sandbox.script, script=arguments["script"]), "Its files are gone.", shell=True)


def told(done: Execution, consequence: str = "", limit: int = OUTPUT_CHARACTERS) -> str:
    """Describe an execution for an agent: output, error, exit status, and the reason if it was ended.

    Args:
        done: execution to describe.
        consequence: consequence of the end of its process.
        limit: maximum number of characters of the output that are shown.
    """
    lines = [clip(done.output.rstrip("\n"), limit)] if done.output.strip("\n") else []
    if done.cut:
        lines.append("[the rest of the output was thrown away]")
    if done.error is not None:
        lines.append(clip(done.error, limit))
    if done.status and done.ending is None:
        lines.append(f"[exit status {done.status}]")
    if done.ending is not None:
        lines.append(f"[ended: {_ENDINGS[done.ending]}.{' ' + consequence if consequence else ''}]")
    return "\n".join(lines) or "[no output]"
