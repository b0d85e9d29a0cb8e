"""The far end of a cell's channel: JSON lines on two descriptors."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

MAX_LINE = 4 << 20
MAX_CONTAINERS, MAX_SYMBOLS = 100_000, 300_000
"""Bytes of a reply, its lists and objects, and these with its commas and colons; a child that sends more is ended."""


def oversized(line: bytes) -> str | None:
    """Return the reason why a line of JSON is too large to be read, or None.

    Looks at bytes only: parsing a million empty lists holds up every other thread of the reader for seconds.

    >>> oversized(b"[" * 100_001)
    'take more than 100000 containers or 300000 values and names; no more'
    >>> oversized(b'{"text": "' + b"[" * 100_001 + b'"}')
    """
    if len(line) > MAX_LINE:
        return f"take {len(line)} bytes; at most {MAX_LINE}"
    if _is_full(line):
        unescaped = line.replace(b"\\\\", b"").replace(b'\\"', b"")
        if unescaped.count(b'"') > 2 * MAX_SYMBOLS or _is_full(b"".join(unescaped.split(b'"')[::2])):
            return f"take more than {MAX_CONTAINERS} containers or {MAX_SYMBOLS} values and names; no more"
    return None


def _is_full(text: bytes) -> bool:
    containers = text.count(b"[") + text.count(b"{")
    return containers > MAX_CONTAINERS or containers + text.count(b",") + text.count(b":") > MAX_SYMBOLS


class Channel:
    """Reads requests and writes replies, one JSON object on each line.

    Keeps its own references to functions of modules, so that a candidate which replaces them breaks its own program
    only.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._buffer = b""
        self._read, self._write, self._exit = os.read, os.write, os._exit
        self._loads, self._dumps = json.JSONDecoder().decode, json.JSONEncoder().encode
        self._oversized = oversized

    def receive(self) -> dict[str, Any]:
        """Return the next request; the process ends where there will be none."""
        while b"\n" not in self._buffer:
            chunk = self._read(self._requests, 65536)
            if not chunk:
                self._exit(0)
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return self._loads(line.decode())

    def send(self, reply: dict[str, Any], *, within_limit: bool = False) -> None:
        """Write a reply, after everything that was printed.

        Args:
            reply: JSON-like data.
            within_limit: whether to reject a reply that is too large to be read; else such a reply ends the process.

        Raises:
            ValueError: the reply is rejected.
        """
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):  # a candidate may have closed or replaced them; the reply matters
                stream.flush()
        line = self._dumps(reply).encode()
        if within_limit and (fault := self._oversized(line)):
            raise ValueError(f"the values of a call {fault} can be passed")
        data = memoryview(line + b"\n")
        while data:
            data = data[self._write(self._replies, data) :]
