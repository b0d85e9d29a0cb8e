"""Programs of users, each with a life of one episode."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mrlm_pl.concurrency.calls import call_function
from mrlm_pl.errors import ProgramError
from mrlm_pl.sandbox.wall.kernel import ending_with_parent

OUTPUT_BYTES, ERROR_BYTES = 1 << 20, 1500
"""Bytes that are kept of the end of a program's output and of its error output.

A record keeps the first 2000 characters of an error. The last line of the error output, which names the fault, is among
them."""

LEFT_BEHIND_SECONDS = 1.0
"""Seconds to wait for the rest of an output while a process outside the program's group holds the pipe."""

PRINTED_MB = 64
"""Largest output, and largest error output, of a program; one that prints more is stopped."""


@dataclass(frozen=True)
class Endpoint:
    """The addresses and the key with which a program makes the calls of an episode.

    Args:
        base_url: base URL for the OpenAI client.
        key: key of the whole episode; with it the model's name selects the agent.
        url: URL of the episode, to which ``/reward`` is posted.
    """

    base_url: str
    key: str
    url: str

    def agent_key(self, agent: str) -> str:
        """Return the key of one agent, whatever model its calls name."""
        return f"{self.key}.{agent}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a program."""
        host = self.url.partition("://")[2].partition(":")[0]
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host)))
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.key,
            "MRLM_EPISODE_URL": self.url,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }


async def run_command(command: Sequence[str], row: Mapping[str, Any], endpoint: Endpoint) -> str:
    """Run a command to its end and return its output.

    It begins a process group, which is killed at the end and when this coroutine is cancelled.

    Args:
        command: words of the command, with fields of the row in braces.
        row: row of the data, which the program also receives as JSON on its standard input.
        endpoint: endpoint for the program's calls.

    Raises:
        ProgramError: the program does not exist, fails (the message has the end of its error output), or prints without
            end.
    """
    words = [word.format_map(row) for word in command]
    if shutil.which(words[0]) is None:
        raise ProgramError(f"there is no program {words[0]!r}; name one on PATH, or its whole path")
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(row).encode())
        stdin.seek(0)
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program,
            *ending_with_parent(signal.SIGKILL),
            *words,
            stdin=stdin,
            env=os.environ | endpoint.variables(),
            start_new_session=True,
        )
    try:
        await asyncio.wait([program.exited])
        program.stop()
        await asyncio.wait([program.closed], timeout=LEFT_BEHIND_SECONDS)
    finally:
        program.stop()
        try:
            await asyncio.shield(asyncio.wait([program.exited]))
        finally:
            transport.close()  # while a program runs, this takes its status, which asyncio then misses
    if program.flooded:
        raise ProgramError(f"the program {words[0]!r} printed more than {PRINTED_MB} MiB; print less, or into a file")
    if status := transport.get_returncode():
        end = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        errors = program.text(2, ERROR_BYTES).strip() or "no error output"
        raise ProgramError(f"the program {words[0]!r} ended with {end}: {errors}")
    return program.text(1, OUTPUT_BYTES)


class _Program(asyncio.SubprocessProtocol):
    """A program that runs, and the ends of its output and error output; one that prints without end is killed.

    Attributes:
        exited: future that is done when the program has ended.
        closed: future that is done when the processes that it started have closed its pipes as well.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.flooded = False
        self._printed = {1: bytearray(), 2: bytearray()}
        self._sizes = Counter[int]()

    def connection_made(self, transport: Any) -> None:
        self._process = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._sizes[fd] += len(data)
        self._printed[fd] += data
        if len(self._printed[fd]) > 2 * OUTPUT_BYTES:
            del self._printed[fd][:-OUTPUT_BYTES]
        if self._sizes[fd] > PRINTED_MB << 20:
            self.flooded = True
            self.stop()

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)

    def stop(self) -> None:
        """Kill its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)

    def text(self, fd: int, most: int) -> str:
        """Return the last bytes of its output as text."""
        return self._printed[fd][-most:].decode(errors="replace")


async def run_function(function: Callable[..., Any], row: Mapping[str, Any], endpoint: Endpoint) -> Any:
    """Return the value of a function of the row and the endpoint; see :func:`~mrlm_pl.concurrency.calls.call_function`.

    Raises:
        ProgramError: it raises, or the event loop that ``async`` functions share has stood still.
    """
    try:
        return await call_function(function, dict(row), endpoint)
    except Exception as error:  # of the user's
        name = getattr(function, "__name__", repr(function))
        raise ProgramError(f"the function {name!r} raised {type(error).__name__}: {error}") from error
