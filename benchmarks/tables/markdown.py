"""Markdown tables, and their cells of means with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def columns(rows: Iterable[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]], titles: str) -> str:
    """Return a Markdown table of rows, or of rows by name, by the title and the format of each column.

    >>> print(columns({"a": {"cost": {"s": 0.25}}}, "name: `{name}` | seconds: {cost[s]:.1f}"))
    | name | seconds |
    | --- | --- |
    | `a` | 0.2 |
    <BLANKLINE>
    """
    if isinstance(rows, Mapping):
        rows = [{"name": name, **row} for name, row in rows.items()]
    header, texts = zip(*(text.split(": ", 1) for text in titles.split(" | ")), strict=True)
    return table(header, ([text.format_map(row) for text in texts] for row in rows))


def pivot(title: str, cells: Iterable[tuple[object, object, object]]) -> str:
    """Return a Markdown table of cells with the names of their rows and columns.

    >>> print(pivot("seed", [(0, "before", 0.1), (0, "after", 0.2), (1, "after", 0.3)]))
    | seed | before | after |
    | --- | --- | --- |
    | 0 | 0.1 | 0.2 |
    | 1 |  | 0.3 |
    <BLANKLINE>
    """
    found = {(row, column): cell for row, column, cell in cells}
    rows, names = (dict.fromkeys(key[part] for key in found) for part in (0, 1))
    return table([title, *map(str, names)], ([row, *(found.get((row, name), "") for name in names)] for row in rows))


def plus_minus(value: Sequence[float], sign: str = "") -> str:
    """Return a mean with the half width of its interval, which one value alone does not have.

    >>> plus_minus((0.0104, 0.02)), plus_minus((0.0104, 0.02), "+"), plus_minus((0.0104, float("nan")))
    ('0.010 ± 0.020', '+0.010 ± 0.020', '0.010')
    """
    mean, half = value
    return f"{mean:{sign}.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def between(mean: float, ci95: Sequence[float], sign: str = "") -> str:
    """Return a mean with its interval.

    >>> between(0.2, (0.1, 0.25))
    '0.200 [0.100, 0.250]'
    """
    return f"{mean:{sign}.3f} [{', '.join(f'{bound:{sign}.3f}' for bound in ci95)}]"
