"""Scoring of SQL tasks: the state of the tables after a change, and the answers to a question."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mrlm_environments.sql.functions import text

TOLERANCE = 1e-2
"""Numbers of answers that differ by this or less are equal."""

NOTHING = frozenset(("", "none", "null"))
_NUMBER = re.compile(r"[+-]?(?=\.?\d)(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?([eE][+-]?\d{1,3})?%?")


def state_hash(tables: Iterable[Iterable[Sequence[Any]]]) -> str:
    """Return AgentBench's hash of the tables' rows: equal for equal rows in any order.

    The first five hexadecimal digits of the MD5 of each row (its columns that are not NULL, joined by commas) are
    sorted and joined by commas; the MD5 of that is the table's. Hashes of several tables are sorted, joined by ``_``.

    >>> state_hash([[("a", "1"), ("b", None)]]) == state_hash([[("b", None), ("a", "1")]])
    True
    """
    joined = ((",".join(text(value) for value in row if value is not None) for row in rows) for rows in tables)
    return "_".join(sorted(_md5(",".join(sorted(_md5(row)[:5] for row in rows))) for rows in joined))


def _md5(content: str) -> str:
    return hashlib.md5(content.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def equal_answers(given: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether two lists of answers hold the same values, each as often, in any order.

    Numbers are compared by value with :data:`TOLERANCE`, with thousands separators and a percent sign left out; other
    texts exactly, but for spaces around them. An empty list and a single "none", "null" or NULL say the same.

    >>> equal_answers(["1,234", 7.001], ["7", "1234.0"]), equal_answers(["a", "a"], ["a"]), equal_answers([], ["none"])
    (True, False, True)
    """
    (numbers, texts), (wanted_numbers, wanted_texts) = _sorted_out(given), _sorted_out(expected)
    if texts != wanted_texts or len(numbers) != len(wanted_numbers):
        return False
    pairs = zip(numbers, wanted_numbers, strict=True)  # sorted lists match in order if they match at all
    return all(math.isclose(one, other, rel_tol=0.0, abs_tol=TOLERANCE) for one, other in pairs)


def _sorted_out(values: Sequence[Any]) -> tuple[list[float], Counter[str]]:
    """Return the numbers of some answers, sorted, and the other texts."""
    shown = ["" if value is None else str(value).strip() for value in values] or [""]
    read = [(_number(answer), answer) for answer in shown]
    texts = Counter("" if answer.lower() in NOTHING else answer for number, answer in read if number is None)
    return sorted(number for number, _ in read if number is not None), texts


def _number(value: str) -> float | None:
    if len(value) > 400 or not _NUMBER.fullmatch(value):
        return None
    number = float(value.replace(",", "").rstrip("%"))
    return number if math.isfinite(number) else None
