"""The files of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def read(name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return rows by a key of theirs, in their order."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
