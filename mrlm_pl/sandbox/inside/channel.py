"""The far end of a cell's channel: JSON lines on two descriptors."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

MAX_LINE = 4 << 20
"""Bytes of a reply; a child that sends more is ended."""


class Channel:
    """Reads requests and writes replies, one JSON object on each line.

    Keeps its own references to what it needs, so that a candidate which replaces functions of modules breaks its own
    program only.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._buffer = b""
        self._read, self._write, self._exit = os.read, os.write, os._exit
        self._loads, self._dumps = json.JSONDecoder().decode, json.JSONEncoder().encode

    def receive(self) -> dict[str, Any]:
        """The next request; the process ends where there will be none."""
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
            within_limit: whether to refuse what is longer than ``MAX_LINE``, rather than be ended for it.

        Raises:
            ValueError: the reply is refused.
        """
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):  # a candidate may have closed or replaced them; the reply matters
                stream.flush()
        data = memoryview(self._dumps(reply).encode() + b"\n")
        if within_limit and len(data) > MAX_LINE:
            raise ValueError(f"the values of a call take {len(data)} bytes; at most {MAX_LINE} can be passed")
        while data:
            data = data[self._write(self._replies, data) :]
