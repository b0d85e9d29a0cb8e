"""Replies of a child: bounded before they are read, so that none can hold up the other threads of a trainer."""

from __future__ import annotations

import json
import threading
import time

import pytest

from mrlm_pl.sandbox import Cell, Sandbox
from mrlm_pl.sandbox.inside.channel import MAX_CONTAINERS, MAX_LINE, MAX_SYMBOLS, oversized

STILL_SECONDS = 1.0
"""The longest that another thread may be held up, in seconds of this process, which a busy machine may interrupt."""

# Lines that a hostile child writes on its descriptor for replies.
FORGED = {
    "lists": b'{"ok": [' + b"[]," * 1_000_000 + b"[]]}",
    "tables": b'{"ok": [' + b"{}," * 1_000_000 + b"{}]}",
    "lists in lists": b'{"ok": [' + b"[[[]]]," * 500_000 + b"[]]}",
    "names": b'{"ok": {' + b",".join(b'"%x":0' % number for number in range(350_000)) + b"}}",
    "lists between quotes": b'{"\\"": 0, "ok": ["\\\\", ' + b"[]," * 1_000_000 + b'"\\\\", "\\""]}',
    "numbers": b'{"ok": [' + b"7," * 1_500_000 + b"7]}",
}
WRITING = """
import os
text = open("forged", "rb").read()
while text: text = text[os.write(4, text):]
"""


class Ticking(threading.Thread):
    """Another thread of the trainer: the longest time for which it did not run, in seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self._ending = 0.0, threading.Event()

    def __enter__(self) -> Ticking:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()

    def run(self) -> None:
        last = time.process_time()
        while not self._ending.wait(0.002):
            now = time.process_time()
            self.longest, last = max(self.longest, now - last), now


def write_in(cell: Cell, data: bytes) -> None:
    """Let the child have a file of the data."""
    for start in range(0, len(data), 1 << 20):
        source = f"open('forged', 'ab').write({data[start : start + (1 << 20)]!r})"
        assert cell.request({"operation": "run", "source": source}, time.monotonic() + 60) == {"ok": None}


@pytest.mark.parametrize("kind", sorted(FORGED))
@pytest.mark.long_after(2)
def test_a_forged_reply_does_not_hold_up_other_threads(kind: str) -> None:
    data = FORGED[kind]
    if len(data) > MAX_LINE:
        data = b'{"ok": [' + data[8 : MAX_LINE // 2] + b"0]}"
    heap = [[number] for number in range(400_000)]  # a trainer's objects, which each collection visits
    with Sandbox(wall_seconds=60).open() as cell:
        write_in(cell, data + b"\n")
        with Ticking() as other:
            cell.request({"operation": "run", "source": WRITING}, time.monotonic() + 60)
    assert cell.ending == "output"
    assert other.longest < STILL_SECONDS
    assert len(heap) == 400_000


def test_a_value_of_too_many_parts_is_an_error_of_the_call_alone() -> None:
    sandbox = Sandbox(wall_seconds=60)
    program = (
        "def many(): return [[] for _ in range(1_000_000)]\ndef long(): return 'x' * (5 << 20)\ndef few(): return 7"
    )
    with sandbox.open() as cell:
        load = {"operation": "load", "given": "", "source": program, "required": ["many"]}
        assert cell.request(load, time.monotonic() + 60) == {"ok": None}
        call = {"operation": "call", "arguments": [], "named": {"dict": []}}
        for name, fault in (("many", "100000 containers"), ("long", "bytes; at most 4194304")):
            with Ticking() as other:
                reply = cell.request(call | {"name": name}, time.monotonic() + 60)
            assert reply["kind"] == "ValueError"
            assert fault in reply["error"]
            assert other.longest < STILL_SECONDS
        assert cell.request(call | {"name": "few"}, time.monotonic() + 60) == {"ok": 7}


FILLING = """
import os, threading
with open("/proc/self/fd/3", "wb", buffering=0) as own:
    requests = os.dup(own.fileno())
os.set_blocking(requests, False)
def fill():
    while True:
        try: os.write(requests, b" " * 65536)
        except OSError: pass
threading.Thread(target=fill, daemon=True).start()
"""


@pytest.mark.long_after(1)
def test_a_child_that_fills_its_own_requests_is_no_error_of_the_trainer(level: str) -> None:
    with Sandbox(level=level, wall_seconds=60).open() as cell:
        cell.request({"operation": "run", "source": FILLING}, time.monotonic() + 60)
        outcomes: list[object] = []
        while len(outcomes) < 20 and "ended" not in outcomes:
            cell.request({"operation": "run", "source": f"len('{'x' * 2_000_000}')"}, time.monotonic() + 5)
            outcomes.append("reply" if cell.ending is None else "ended")
        assert outcomes.count("reply") == 20 or outcomes[-1] == "ended"


def test_other_encodings_are_no_reply() -> None:
    """In UTF-16, a letter with the byte of a quote would make lists look like text."""
    data = '{"\u2222": [[], []]}'.encode("utf-16-le") + b"\n"
    with Sandbox(wall_seconds=60).open() as cell:
        write_in(cell, data)
        cell.request({"operation": "run", "source": WRITING}, time.monotonic() + 60)
    assert cell.ending == "protocol"


@pytest.mark.parametrize(
    "value",
    [
        "[{,:" * 200_000,
        '"\\' * 150_000,
        ["\\" * count + '"' + "[" * 40_000 for count in range(8)],
        [0] * (MAX_SYMBOLS - 10),
        [[]] * (MAX_CONTAINERS - 10),
    ],
)
def test_what_is_no_larger_than_allowed_passes(value: object) -> None:
    assert oversized(json.dumps({"ok": value}).encode()) is None


@pytest.mark.parametrize(
    "value",
    [
        "x" * MAX_LINE,
        [0] * (MAX_SYMBOLS + 10),
        [[]] * (MAX_CONTAINERS + 10),
        ["\\", *[{}] * (MAX_CONTAINERS + 10), '"', "\\\\"],
        {str(number): 0 for number in range(MAX_SYMBOLS // 2 + 10)},
    ],
)
def test_what_is_larger_does_not(value: object) -> None:
    assert oversized(json.dumps({"ok": value}).encode()) is not None
