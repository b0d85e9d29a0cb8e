"""One locked-down child, seen from the trainer: requests go in, plain values and output come out, within limits."""

from __future__ import annotations

import json
import os
import select
import threading
import time
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox.host.server_process import STARTUP_SECONDS, ServerProcess
from mrlm_pl.sandbox.host.usage import DiskUse, process_tree, resident_bytes
from mrlm_pl.sandbox.inside.channel import MAX_LINE, oversized
from mrlm_pl.sandbox.wall.confinement import MAX_FILES, MEBIBYTE, CellSettings

MAX_PRINTED = 16 * MEBIBYTE
"""Bytes of output after which a program is ended; long before, the rest is thrown away."""

WATCH_SECONDS = 0.05

Ending = Literal["time", "output", "memory", "disk", "exit", "protocol"]


class _EndedError(Exception):
    """The child is gone, and why: ``time``, ``output``, ``memory``, ``disk``, ``exit`` or ``protocol``."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending: Ending = ending


class Cell(AbstractContextManager["Cell"]):
    """A child that answers requests until it is closed. Use it in one thread at a time, as a context manager.

    Args:
        server: server that forks the child.
        settings: limits of the child.
        max_output: bytes of the output that are kept.

    Raises:
        SandboxError: the child could not be locked down.
    """

    def __init__(self, server: ServerProcess, settings: CellSettings, max_output: int) -> None:
        self.server, self.settings, self.max_output = server, settings, max_output
        self.ending: Ending | None = None
        self._output, self._printed = bytearray(), 0
        self._buffer = bytearray()
        child_requests, self._requests = os.pipe()
        self._replies, child_replies = os.pipe()
        self._out, child_output = os.pipe()
        os.fchmod(child_output, 0o622)  # scripts open it again as /dev/stdout and /dev/stderr
        child_ends = [child_requests, child_replies, child_output]
        for descriptor in (self._requests, self._replies, self._out):
            os.set_blocking(descriptor, False)
        try:
            self._ended: threading.Event = server.open(settings, child_ends)
        finally:
            for descriptor in child_ends:
                os.close(descriptor)
        # For a cell that was not closed, such as one of an environment that was dropped in the middle of an episode.
        self._finalizer = weakref.finalize(
            self, _abandon, server, settings.number, (self._requests, self._replies, self._out)
        )
        self._finalizer.atexit = False  # the server ends, and all its cells with it
        self._out_open = True
        self._next_watch = time.monotonic() + WATCH_SECONDS
        self._process = 0
        folder = server.folder_of(settings.number)
        self._disk = DiskUse(folder, settings.disk_mb * MEBIBYTE) if folder else None
        try:
            self._process = self._set_up()
        except BaseException:  # also an interrupt: nothing is left behind
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Return the child's reply; nothing if it ended, or was ended for a limit, before it: ``ending`` says why.

        Args:
            message: the request.
            deadline: value of ``time.monotonic()`` at which the child is ended.
        """
        if self.ending is None:
            try:
                return self._exchange(json.dumps(message).encode() + b"\n", deadline)
            except _EndedError as error:
                self.ending = error.ending
        return {}

    def output(self) -> tuple[str, bool]:
        """Return the text printed since the last call, and whether a part of it was discarded."""
        self._drain()
        text, cut = bytes(self._output).decode("utf-8", "replace"), self._printed > len(self._output)
        self._output.clear()
        self._printed = 0
        return text, cut

    def close(self) -> None:
        """End the child and all that it started, and remove its files; may be called twice.

        Raises:
            SandboxError: the child does not end.
        """
        if self._finalizer.detach() is None:
            return  # it is closed
        try:
            self.server.kill(self.settings.number, self._ended)
        finally:
            self._drain()
            for descriptor in (self._requests, self._replies, self._out):
                os.close(descriptor)
            self._requests, self._out_open = -1, False  # another file may have the number now

    def _drain(self) -> None:
        """Read the available output; endless output is left after the bytes that end a cell."""
        with suppress(_EndedError):
            while self._out_open and self._read_output():
                pass

    def _set_up(self) -> int:
        """Return the child's process once it is locked down."""
        try:
            message = self._exchange(b"", time.monotonic() + STARTUP_SECONDS)
        except _EndedError as error:
            raise SandboxError(f"a sandbox cell ended before it was locked down ({error.ending})") from error
        if "process" not in message:
            raise SandboxError(f"a sandbox cell could not be locked down: {message.get('failed', message)}")
        return int(message["process"])

    def _exchange(self, request: bytes, deadline: float) -> dict[str, Any]:
        """Send a request, if there is one, and wait for the next line."""
        unsent = memoryview(request)
        searched = 0
        while True:
            if not unsent:
                if (end := self._buffer.find(b"\n", searched)) >= 0:
                    line = bytes(self._buffer[:end])
                    del self._buffer[: end + 1]
                    return _parse_message(line)
                searched = len(self._buffer)
            if len(self._buffer) > MAX_LINE:
                raise _EndedError("output")
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise _EndedError("time")
            self._watch()
            poller = select.poll()  # select() cannot wait for descriptors above 1023, which a trainer may have
            poller.register(self._replies, select.POLLIN)
            if self._out_open:
                poller.register(self._out, select.POLLIN)
            if unsent:
                poller.register(self._requests, select.POLLOUT)
            ready = {descriptor for descriptor, _ in poller.poll(min(seconds_left, WATCH_SECONDS) * 1000)}
            if self._requests in ready:
                try:
                    unsent = unsent[os.write(self._requests, unsent[:65536]) :]
                except BlockingIOError:
                    pass  # the child has filled its own requests meanwhile
                except BrokenPipeError as error:
                    raise _EndedError("exit") from error
            if self._out in ready:
                self._read_output()
            if self._replies in ready:
                chunk = os.read(self._replies, 65536)
                if not chunk:
                    raise _EndedError("exit")
                self._buffer += chunk

    def _read_output(self) -> bool:
        """Read the available output; return whether there was any."""
        try:
            chunk = os.read(self._out, 65536)
        except BlockingIOError:
            return False
        if not chunk:
            self._out_open = False
            return False
        self._printed += len(chunk)
        self._output += chunk[: max(self.max_output - len(self._output), 0)]
        if self._printed > MAX_PRINTED:
            raise _EndedError("output")
        return True

    def _watch(self) -> None:
        """End a cell that uses too much of a resource without a limit of the kernel: memory of all processes, disk."""
        now = time.monotonic()
        if now < self._next_watch:
            return
        processes = list(process_tree(self._process)) if self._process else []
        # A program has one process, whose memory the kernel bounds; at mere limits it may start others.
        if self.settings.shell and sum(map(resident_bytes, processes)) > self.settings.memory_mb * MEBIBYTE:
            raise _EndedError("memory")
        if self._disk is not None:
            size, files = self._disk.measure(processes)
            if size > self.settings.disk_mb * MEBIBYTE or files > MAX_FILES:
                raise _EndedError("disk")
        seconds_spent = time.monotonic() - now
        self._next_watch = now + max(WATCH_SECONDS, 5 * seconds_spent)  # watching takes a fifth of the time at most


def _abandon(server: ServerProcess, number: int, descriptors: tuple[int, ...]) -> None:
    server.abandon(number)
    for descriptor in descriptors:
        os.close(descriptor)


def _parse_message(line: bytes) -> dict[str, Any]:
    if oversized(line):
        raise _EndedError("output")
    try:
        message = json.loads(line.decode())  # UTF-16, which `loads` guesses, would hide brackets from the look at bytes
    except (ValueError, RecursionError) as error:
        raise _EndedError("protocol") from error
    if not isinstance(message, dict):
        raise _EndedError("protocol")
    return message
