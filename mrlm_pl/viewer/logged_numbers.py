"""The numbers of a ``metrics.csv`` that grows: a reader of a long run reads its new rows alone."""

from __future__ import annotations

import csv
import math
from collections import Counter
from contextlib import suppress
from pathlib import Path

from mrlm_pl.viewer.line_file import LineFile

_NOT_FINITE = ("nan", "inf", "-inf")


class LoggedNumbers:
    """Reads the complete rows of a file of metrics.

    Args:
        path: path of the file.

    Attributes:
        not_finite: number of NaN or infinite values in each column, by name; the column has None in their place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = LineFile(path)
        self._last = (0, b"")  # offset and text of a line
        self._columns: dict[str, list[float | None]] = {}
        self.not_finite = Counter[str]()

    def columns(self) -> dict[str, list[float | None]]:
        """Return copies of all columns by name, with None where a row lacks a number.

        Raises:
            OSError: the file cannot be read.
        """
        offset, text = self._last
        if text and self._lines.line(offset) != text:  # a new file may have the number (inode) of an earlier one
            self._lines = LineFile(self.path)
        for item in self._lines.new_lines():
            if item is None:
                self._columns, self.not_finite = {}, Counter()
                continue
            self._last = item
            row: list[str] = []
            with suppress(csv.Error):  # damaged, as by a power failure
                row = next(csv.reader([item[1].decode(errors="replace")]), [])
            if not self._columns:
                self._columns = {name: [] for name in row}
            elif len(row) == len(self._columns):  # a kill may have truncated it
                for (name, values), cell in zip(self._columns.items(), row, strict=True):
                    values.append(_number(cell))
                    self.not_finite[name] += cell in _NOT_FINITE
        return {name: [*values] for name, values in self._columns.items()}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return float(f"{value:.7g}") if math.isfinite(value) else None
