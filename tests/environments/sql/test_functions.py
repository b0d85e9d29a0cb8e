"""LIKE equals SQLite's own on ASCII letters, at a cost that does not grow with the number of patterns."""

from __future__ import annotations

import random
import sqlite3
import tracemalloc

import pytest
from mrlm_environments.sql.functions import like


@pytest.mark.parametrize("seed", range(20))
def test_like_equals_sqlite_s(seed: int) -> None:
    chance, connection = random.Random(seed), sqlite3.connect(":memory:")
    for _ in range(300):
        # No escape at the end: SQLite matches nothing there, MySQL the sign itself.
        pattern = "".join(chance.choices(["a", "B", "*", "?", "[", "]", "!", "%", "_", "|%", "|_", "||", "|a"], k=6))
        value = "".join(chance.choices("Ab*?[]!%_|", k=chance.randrange(7)))
        expected = connection.execute("SELECT ? LIKE ? ESCAPE '|'", (value, pattern)).fetchone()[0]
        assert like(pattern, value, "|") == expected, (pattern, value)


def test_many_long_patterns_leave_no_memory_behind() -> None:
    letters = random.Random(0)
    patterns = ["".join(letters.choices("ab%_", k=300)) for _ in range(200)]
    like("a%", "a" * 300)
    tracemalloc.start()
    for pattern in patterns:
        like(pattern, "a" * 300)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000
