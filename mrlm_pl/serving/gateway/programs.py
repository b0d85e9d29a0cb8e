"""Programs of users, each with a life of one episode."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mrlm_pl.concurrency.calls import as_error, in_daemon
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.errors import ProgramError
from mrlm_pl.sandbox.wall.kernel import ending_with_parent

logger = logging.getLogger(__name__)

OUTPUT_BYTES, ERROR_BYTES = 1 << 20, 2000
"""Ends of the output and of the error output of a program that are kept."""

PRINTED_MB = 64
"""Largest output, and largest error output, of a program; one that prints more is stopped."""


@dataclass(frozen=True)
class Endpoint:
    """The addresses and the key with which a program makes the calls of an episode.

    Args:
        base_url: of the OpenAI client.
        key: of the whole episode: the name of the model chooses the agent.
        url: of the episode, to which ``/reward`` is posted.
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
        command: with fields of the row in braces.
        row: of the data, which the program also receives as JSON on its standard input.
        endpoint: of its calls.

    Raises:
        ProgramError: it does not exist, fails (the message has the end of its error output), or prints without end.
    """
    words = [word.format_map(row) for word in command]
    if shutil.which(words[0]) is None:
        raise ProgramError(f"there is no program {words[0]!r}; name one on PATH, or its whole path")
    with tempfile.TemporaryFile() as given, _Pipe(OUTPUT_BYTES) as output, _Pipe(ERROR_BYTES) as errors:
        given.write(json.dumps(row).encode())
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *ending_with_parent(signal.SIGKILL),
            *words,
            stdin=given,
            stdout=output.end,
            stderr=errors.end,
            env=os.environ | endpoint.variables(),
            start_new_session=True,
        )
        output.end.close()
        errors.end.close()

        def stop() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        for pipe in (output, errors):
            pipe.follow(stop)
        try:
            status = await process.wait()
        finally:
            stop()
            await asyncio.shield(process.wait())
        for pipe in (output, errors):
            while pipe.read():
                pass
    if output.flooded or errors.flooded:
        raise ProgramError(f"the program {words[0]!r} printed more than {PRINTED_MB} MiB; print less, or into a file")
    if status:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        raise ProgramError(f"the program {words[0]!r} ended with {how}: {errors.text.strip() or 'no error output'}")
    return output.text


class _Pipe(AbstractContextManager["_Pipe"]):
    """A pipe that a program prints into, and the end of its text.

    Args:
        most: bytes that are kept.

    Attributes:
        end: the program's end.
    """

    def __init__(self, most: int) -> None:
        self.most, self._size, self._kept = most, 0, bytearray()
        self._source, end = os.pipe()
        os.set_blocking(self._source, False)
        self.end = os.fdopen(end, "wb", 0)

    def __exit__(self, *raised: object) -> None:
        asyncio.get_running_loop().remove_reader(self._source)
        os.close(self._source)
        self.end.close()

    @property
    def flooded(self) -> bool:
        """True if the program printed more than :data:`PRINTED_MB`."""
        return self._size > PRINTED_MB << 20

    @property
    def text(self) -> str:
        """The last bytes as text."""
        return self._kept[-self.most :].decode(errors="replace")

    def follow(self, stop: Callable[[], None]) -> None:
        """Read the output from now on; call ``stop`` where it does not end."""
        loop = asyncio.get_running_loop()

        def ready() -> None:
            if not self.read():
                loop.remove_reader(self._source)
            if self.flooded:
                stop()

        loop.add_reader(self._source, ready)

    def read(self) -> bool:
        """Read a part of the text; return False if it has ended, no more of it is there, or it is too long."""
        try:
            text = os.read(self._source, 1 << 16)
        except BlockingIOError:
            return False
        self._size += len(text)
        self._kept += text
        if len(self._kept) > 2 * self.most:
            del self._kept[: -self.most]
        return bool(text) and not self.flooded


async def run_function(function: Callable[..., Any], row: Mapping[str, Any], endpoint: Endpoint) -> Any:
    """Return the value of a function of the row and the endpoint, plain or ``async``, which runs in a daemon thread.

    Raises:
        ProgramError: it raises.
    """
    call, name = partial(function, dict(row), endpoint), getattr(function, "__name__", repr(function))
    try:
        made = call() if inspect.iscoroutinefunction(function) else await _in_thread(call, name)
        return await _awaited(made) if inspect.isawaitable(made) else made
    except Exception as error:  # of the user's
        raise ProgramError(f"the function {name!r} raised {type(error).__name__}: {error}") from error


async def _in_thread(call: Callable[[], Any], name: str) -> Any:
    running = in_daemon(call)
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        logger.warning("the function %r runs on in its thread after the end of its episode; its calls fail", name)
        raise


async def _awaited(made: Awaitable[Any]) -> Any:
    """Return the value of a coroutine, which has an event loop of its own, since it may block."""
    loop = EventLoopThread()
    try:
        return await asyncio.wrap_future(loop.submit(_guarded(made)))
    finally:
        in_daemon(loop.close)


async def _guarded(made: Awaitable[Any]) -> Any:
    try:
        return await made
    except (SystemExit, KeyboardInterrupt) as raised:  # would end the event loop
        raise as_error(raised) from raised
