"""Values by key."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order in which keys and values appear.

    >>> grouped((len(word), word) for word in ("one", "three", "two"))
    {3: ['one', 'two'], 5: ['three']}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def summed(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the sum of the values of each key, in the order in which keys and values appear.

    >>> summed([("a", 1.0), ("b", 2.0), ("a", 0.5)])
    {'a': 1.5, 'b': 2.0}
    """
    found: dict[K, float] = {}
    for key, value in pairs:
        found[key] = found.get(key, 0.0) + value
    return found
