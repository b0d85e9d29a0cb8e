"""MySQL's functions and its comparison of texts, for SQLite.

Only functions that depend on their arguments alone are here, so that an episode can be replayed: there is no clock and
no random number. Arguments are SQLite's values; a NULL makes the result NULL unless a function says otherwise.
"""

from __future__ import annotations

import calendar
import hashlib
import itertools
import math
import sqlite3
import unicodedata
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import regex

COLLATION = "mysql"
MAX_TEXT = 100_000
"""Longest text or blob, in bytes; SQLite rejects longer ones, and so do the functions here."""

MAX_REPLACED = 5_000_000
"""Bound on the product of the lengths of a text and of what replaces its parts, of which the result is made."""

PATTERN_SECONDS = 0.5
MAX_PATTERN = 500
DATE_FORMATS = (
    *("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M"),
    *("%Y-%m-%d", "%Y/%m/%d", "%Y%m%d"),
)
_UNITS = {"DAY": 1, "WEEK": 7}
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}

BUILT_IN = frozenset(
    (
        *("abs", "avg", "coalesce", "count", "group_concat", "hex", "ifnull", "iif", "length", "ltrim", "max", "min"),
        *("nullif", "like", "replace", "round", "rtrim", "sum", "total", "trim", "typeof", "char"),
        *("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "lead"),
        *("first_value", "last_value", "nth_value"),
    )
)
"""SQLite's own functions that may be called: none reads a file, a clock or a random number."""


def folded(text: str) -> str:
    """Return the text without case and accents, which is how MySQL's default collation compares.

    >>> folded("É") == folded("e"), folded("2–1") == folded("2-1")
    (True, False)
    """
    return _folded_short(text) if len(text) <= 200 else _fold(text)


def _fold(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


_folded_short = lru_cache(maxsize=4096)(_fold)  # sorting asks for the same texts again and again


def number_text(value: Any) -> Any:
    """Return a number as MySQL stores it in a text column: without a fraction where it has none.

    >>> number_text(31.0), number_text(2.5), number_text("31.0")
    ('31', '2.5', '31.0')
    """
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value) if isinstance(value, int) else value


def text(value: Any) -> str:
    """Return a value other than NULL as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(number_text(value))


def like_pattern(value: Any, escape: Any) -> str:
    r"""Return a pattern of LIKE as SQLite reads it with a backslash for escape; MySQL's at the end stands for itself.

    >>> like_pattern("A|%%", "|"), like_pattern("a\\", "\\"), like_pattern("a_", "")
    ('a\\%%', 'a\\\\', 'a_')
    """
    letters, sign = iter(folded(text(value))), text(escape)
    return "".join(
        f"\\{next(letters, letter)}" if letter == sign else letter.replace("\\", "\\\\") for letter in letters
    )


def _pattern(value: Any) -> str:
    if len(text(value)) > MAX_PATTERN:
        raise ValueError(f"a regular expression may have {MAX_PATTERN} characters")
    return text(value)


def _found(value: Any, pattern: Any) -> str | None:
    match = regex.search(_pattern(pattern), text(value), regex.IGNORECASE, timeout=PATTERN_SECONDS)
    return match.group() if match else None


def _regexp_replace(value: Any, pattern: Any, by: Any) -> str:
    letters, new = text(value), text(by)
    if len(letters) * len(new) > MAX_REPLACED:
        raise ValueError("the text and its replacement are too long")
    return regex.sub(_pattern(pattern), lambda _: new, letters, flags=regex.IGNORECASE, timeout=PATTERN_SECONDS)


def _place(value: Any, *of: Any) -> int:
    """Return the number of the first of some values that equals this one, from 1, or 0."""
    return next((number for number, one in enumerate(of, 1) if folded(text(one)) == folded(text(value))), 0)


def moment(value: Any, forms: Sequence[str] = DATE_FORMATS) -> datetime | None:
    """Return the date that a text names in one of some forms, by default MySQL's, or None."""
    for form in forms:
        try:
            return datetime.strptime(text(value).strip(), form)
        except ValueError:
            continue
    return None


def _of_moment(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a text's date, and of further values; NULL where the text names none."""

    def of(value: Any, *others: Any) -> Any:
        when = moment(value)
        return None if when is None else read(when, *others)

    return of


def _date(when: datetime, *changes: Any) -> str:
    """Return the date after changes such as ``1 DAY`` or ``-2 MONTH``."""
    for change in changes:
        amount, _, unit = text(change).strip().partition(" ")
        unit = unit.upper().rstrip("S")
        if unit in _UNITS:
            when += timedelta(days=int(amount) * _UNITS[unit])
        else:
            months = when.year * 12 + when.month - 1 + int(amount) * _MONTHS[unit]
            year, month = months // 12, months % 12 + 1
            when = when.replace(year=year, month=month, day=min(when.day, calendar.monthrange(year, month)[1]))
    return when.strftime("%Y-%m-%d")


def _parsed_date(value: Any, form: Any) -> str | None:
    when = moment(value, (text(form),))
    if when is None:
        return None
    return when.strftime("%Y-%m-%d" if when.time() == datetime.min.time() else "%Y-%m-%d %H:%M:%S")


def _concat_ws(separator: Any, *values: Any) -> str | None:
    return None if separator is None else text(separator).join(text(value) for value in values if value is not None)


def _before(value: Any, separator: Any, count: Any) -> str:
    """Return the text before the count-th separator, or after it from the right if the count is negative."""
    if not text(separator) or not int(count):
        return ""
    parts, count = text(value).split(text(separator)), int(count)
    return text(separator).join(parts[:count] if count > 0 else parts[count:])


def _pad(value: Any, width: Any, filling: Any, left: bool) -> str | None:
    """Return a text of a given width, filled up or cut; None where it cannot be filled up."""
    letters, width = text(value), min(int(width), MAX_TEXT)
    fill = "".join(itertools.islice(itertools.cycle(text(filling)), max(0, width - len(letters))))
    if not 0 <= width <= len(letters) + len(fill):
        return None
    return (fill + letters if left else letters + fill)[:width]


def _repeat(value: Any, count: Any) -> str:
    if len(text(value)) * int(count) > MAX_TEXT:
        raise ValueError(f"a text may have {MAX_TEXT} bytes")
    return text(value) * int(count)


def _middle(value: Any, start: Any, length: Any = MAX_TEXT) -> str:
    letters, start = text(value), int(start)
    begin = start - 1 if start > 0 else len(letters) + start
    return letters[begin : begin + max(0, int(length))] if start and begin >= 0 else ""


def _number(value: Any) -> float:
    """Return a value's number: of a text the beginning that is one, else 0."""
    if isinstance(value, (int, float)):
        return value
    prefix = regex.match(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text(value))
    return float(prefix.group()) if prefix else 0.0


def _truncate(value: Any, digits: Any) -> float:
    scale = 10.0 ** max(-300, min(300, int(digits)))
    return math.trunc(_number(value) * scale) / scale


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return None if any(value is None for value in values) else function(*values)

    return call


_STRICT: dict[str, tuple[int, Callable[..., Any]]] = {
    "number_text": (1, number_text),
    "folded": (1, lambda value: folded(text(value))),
    "like_pattern": (2, like_pattern),
    "upper": (1, lambda value: text(value).upper()),
    "lower": (1, lambda value: text(value).lower()),
    "text_left": (2, lambda value, count: text(value)[: max(0, int(count))]),
    "text_right": (2, lambda value, count: text(value)[-int(count) :] if int(count) > 0 else ""),
    "mid": (3, _middle),
    "substring": (-1, _middle),
    "instr": (2, lambda value, part: folded(text(value)).find(folded(text(part))) + 1),
    "substring_index": (3, _before),
    "lpad": (3, partial(_pad, left=True)),
    "rpad": (3, partial(_pad, left=False)),
    "repeat": (2, _repeat),
    "reverse": (1, lambda value: text(value)[::-1]),
    "field": (-1, _place),
    "find_in_set": (2, lambda value, of: _place(value, *text(of).split(","))),
    "ascii": (1, lambda value: text(value).encode()[0] if text(value) else 0),
    "md5": (1, lambda value: hashlib.md5(text(value).encode(), usedforsecurity=False).hexdigest()),
    "floor": (1, lambda value: math.floor(_number(value))),
    "ceil": (1, lambda value: math.ceil(_number(value))),
    "sqrt": (1, lambda value: math.sqrt(_number(value)) if _number(value) >= 0 else None),
    "power": (2, lambda base, exponent: math.pow(_number(base), _number(exponent))),
    "sign": (1, lambda value: (_number(value) > 0) - (_number(value) < 0)),
    "truncate": (2, _truncate),
    "number_to_str": (2, lambda value, digits: f"{_number(value):,.{min(30, max(0, int(digits)))}f}"),
    "octet_length": (1, lambda value: len(text(value).encode())),
    "regexp": (2, lambda pattern, value: int(_found(value, pattern) is not None)),
    "regexp_replace": (3, _regexp_replace),
    "regexp_substr": (2, _found),
    "date": (-1, _of_moment(_date)),
    "year": (1, _of_moment(attrgetter("year"))),
    "month": (1, _of_moment(attrgetter("month"))),
    "day": (1, _of_moment(attrgetter("day"))),
    "str_to_date": (2, _parsed_date),
    "strftime": (2, lambda form, value: _of_moment(datetime.strftime)(value, text(form))),
    "julianday": (1, _of_moment(datetime.toordinal)),
}
ALLOWED = BUILT_IN | _STRICT.keys() | {"concat_ws"}
"""Names of all functions that a statement may call."""


def install(connection: sqlite3.Connection) -> None:
    """Give a connection the functions and the collation."""
    for name, (count, function) in _STRICT.items():
        connection.create_function(name, count, _strict(function), deterministic=True)
    connection.create_function("concat_ws", -1, _concat_ws, deterministic=True)

    def compare(first: str, second: str) -> int:
        one, other = folded(first), folded(second)
        return (one > other) - (one < other)

    connection.create_collation(COLLATION, compare)
