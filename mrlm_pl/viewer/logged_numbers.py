"""The numbers of a ``metrics.csv`` that grows: a reader of a long run reads its new rows alone."""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
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
        self._unread: list[bytes] = []  # rows after those of the columns: a table of runs asks for few of their numbers
        self.not_finite = Counter[str]()

    def columns(self) -> dict[str, list[float | None]]:
        """Return copies of all columns by name, with None where a row lacks a number.

        Raises:
            OSError: the file cannot be read.
        """
        self._update()
        for row in self._rows(self._unread):
            for (name, values), cell in zip(self._columns.items(), row, strict=True):
                values.append(_number(cell))
                self.not_finite[name] += cell in _NOT_FINITE
        self._unread = []
        return {name: [*values] for name, values in self._columns.items()}

    def last(self, name: str) -> float | None:
        """Return the last number of a column, from the end of the file back; None without any.

        Raises:
            OSError: the file cannot be read.
        """
        self._update()
        rows = self._rows(reversed(self._unread) if name in self._columns else ())
        unread = (_number(dict(zip(self._columns, row, strict=True))[name]) for row in rows)
        values = itertools.chain(unread, reversed(self._columns.get(name, ())))
        return next((value for value in values if value is not None), None)

    def _rows(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            with suppress(csv.Error):  # damaged, as by a power failure
                row = next(csv.reader([line.decode(errors="replace")]), [])
                if len(row) == len(self._columns or row):  # a kill may have truncated it
                    yield row

    def _update(self) -> None:
        offset, text = self._last
        if text and self._lines.line(offset) != text:  # a new file may have the number (inode) of an earlier one
            self._lines = LineFile(self.path)
        for item in self._lines.new_lines():
            if item is None:
                self._columns, self._unread, self.not_finite = {}, [], Counter()
                continue
            self._last = item
            if self._columns:
                self._unread.append(item[1])
            else:
                self._columns = {name: [] for row in self._rows([item[1]]) for name in row}


def _number(text: str) -> float | None:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return float(f"{value:.7g}")
    return None
