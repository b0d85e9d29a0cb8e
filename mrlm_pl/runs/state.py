"""The state of a run, which the run writes to its folder; no torch."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrlm_pl.durable_files import write_json

STATE = "state.json"
STOPPED = "stopped without an end"
SILENT_SECONDS = 600.0
"""A run on another machine without a sign of life for longer has stopped."""


def running() -> dict[str, Any]:
    """Return the record of a run that this process trains."""
    return {"state": "running", "host": socket.gethostname(), "process": os.getpid(), "began": _began(os.getpid())}


def write_state(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a state, with the time as its sign of life."""
    with suppress(OSError):  # a full disk ends the run where it writes its results
        write_json(folder / STATE, {**record, "alive": time.time()})


def state_of(text: str) -> tuple[str, str]:
    """Return the state in the content of :data:`STATE`, with its reason.

    The states are ``running``, ``finished``, ``interrupted`` by a signal, ``failed``, :data:`STOPPED` for a run whose
    process is gone, and ``unknown``.
    """
    try:
        found = json.loads(text)
        if found["state"] != "running":
            return str(found["state"]), str(found.get("reason", ""))
        return ("running" if _lives(found) else STOPPED), ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return "unknown", f"the run has no {STATE} that can be read"


def _lives(found: Mapping[str, Any]) -> bool:
    if found["host"] != socket.gethostname():
        return time.time() - float(found["alive"]) < SILENT_SECONDS
    with suppress(PermissionError):  # another user's process
        try:
            os.kill(int(found["process"]), 0)
        except ProcessLookupError:
            return False
    return bool(found["began"] == _began(int(found["process"])))


def _began(process: int) -> str:
    """Return the start of a process in ticks since boot, which differs for a later one of its number.

    Empty where the system does not say.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
