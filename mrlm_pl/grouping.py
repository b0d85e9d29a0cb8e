"""Values by key, in parts of limited size, and inside each other; short names; the common beginning of sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order in which keys and values appear.

    >>> grouped((len(word), word) for word in ("one", "three", "two"))
    {3: ['one', 'two'], 5: ['three']}
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def summed_pairs(pairs: Iterable[tuple[K, tuple[float, float]]]) -> dict[K, tuple[float, float]]:
    """Return the sums of the values of each key, such as totals and counts, in the order in which keys appear.

    >>> summed_pairs([("a", (1.0, 2.0)), ("b", (2.0, 1.0)), ("a", (0.5, 1.0))])
    {'a': (1.5, 3.0), 'b': (2.0, 1.0)}
    """
    pair_sums: dict[K, tuple[float, float]] = {}
    for key, (first, second) in pairs:
        before = pair_sums.get(key, (0.0, 0.0))
        pair_sums[key] = before[0] + first, before[1] + second
    return pair_sums


def summed(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the sum of the values of each key, in the order in which keys and values appear.

    >>> summed([("a", 1.0), ("b", 2.0), ("a", 0.5)])
    {'a': 1.5, 'b': 2.0}
    """
    sums: dict[K, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return sums


def distinct_tails(names: Sequence[str], separator: str) -> list[str]:
    """Return the shortest suffix of parts of each name that distinguishes it from the others; the names differ.

    >>> distinct_tails(["rollout/reward", "rollout/agent/pro/reward", "train/kl"], "/")
    ['rollout/reward', 'pro/reward', 'kl']
    """
    split = [name.split(separator) for name in names]
    ends = Counter(tuple(parts[-n:]) for parts in split for n in range(1, len(parts) + 1))
    counts = (next((n for n in range(1, len(parts)) if ends[tuple(parts[-n:])] == 1), len(parts)) for parts in split)
    return [separator.join(parts[-n:]) for parts, n in zip(split, counts, strict=True)]


def split_by_size(values: Iterable[V], size: Callable[[V], int], most: int, largest: int) -> Iterator[list[V]]:
    """Yield the values in order, in parts of limited size; a larger value is its own part.

    Args:
        values: values to divide.
        size: function that returns the size of a value.
        most: maximum number of values in a part.
        largest: maximum sum of the sizes in a part.

    >>> list(split_by_size(["dddd", "a", "b", "c", "eee"], len, most=2, largest=3))
    [['dddd'], ['a', 'b'], ['c'], ['eee']]
    """
    part: list[V] = []
    total = 0
    for value in values:
        value_size = size(value)
        if part and (len(part) == most or total + value_size > largest):
            yield part
            part, total = [], 0
        part.append(value)
        total += value_size
    if part:
        yield part


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return JSON-like data with each value changed that is neither a mapping nor a list; tuples become lists.

    >>> mapped({"a": [1, 2], "b": 3}, lambda number: -number)
    {'a': [-1, -2], 'b': -3}
    """
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of equal items, such as tokens, at the start of both.

    >>> common_prefix((5, 6, 7), (5, 6, 8, 9))
    2
    """
    length = min(len(first), len(second))
    if tuple(first[:length]) == tuple(second[:length]):
        return length
    return next(n for n in range(length) if first[n] != second[n])


def unique(pairs: Sequence[tuple[str, V]]) -> dict[str, V]:
    """Return a mapping of pairs, such as those of an object of JSON, whose keys must differ.

    Raises:
        ValueError: a key occurs twice.

    >>> unique([("a", 1), ("a", 2)])
    Traceback (most recent call last):
    ValueError: the key 'a' comes twice
    """
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:100]!r} comes twice")
    return mapping
