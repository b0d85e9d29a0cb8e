"""Containers that two processes hold copies of: what one of them changes in its copy, the other one does in its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

KINDS = (list, dict, set, deque)
MAX_CONTAINERS, MAX_VALUES = 32, 1000


class Shared:
    """Copies of the latest ``MAX_CONTAINERS`` containers, each of ``MAX_VALUES`` values at most.

    Args:
        encode: returns a container as data.
        decode: returns the container that data stand for.
    """

    def __init__(self, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        self._encode, self._decode = encode, decode
        self._copies: dict[int, tuple[Any, Any]] = {}

    def hold(self, number: int, container: Any) -> Any:
        """Return the copy that is held under the number: an earlier one with the content of this one, or this one."""
        copied = self._copies.pop(number, (container, None))[0]
        if copied is not container:
            update(copied, container)
        if _is_small(copied):
            self._copies[number] = (copied, self._encode(copied))
            while len(self._copies) > MAX_CONTAINERS:
                del self._copies[next(iter(self._copies))]
        return copied

    def number_of(self, value: Any) -> int | None:
        """Return the number under which a container is held; None for any other value."""
        return next((number for number, (container, _) in self._copies.items() if container is value), None)

    def changed(self) -> list[Any]:
        """Return the number and data of each container that changed since the last look."""
        changes = []
        for number, (container, data) in self._copies.items():
            new_data = self._encode(container)
            if new_data != data:
                changes.append([number, new_data])
                self._copies[number] = (container, new_data)
        return changes

    def apply(self, changes: Any) -> None:
        """Change the copies in the same way; those that are no longer held are left out."""
        for number, data in changes:
            if number in self._copies:
                container = self._copies[number][0]
                update(container, self._decode(data))
                self._copies[number] = (container, self._encode(container))


def update(old: Any, new: Any) -> None:
    """Give a container another one's content in place, inner containers included.

    >>> inner = [1]
    >>> outer = {"a": inner, "b": 0}
    >>> update(outer, {"a": [1, 2]})
    >>> outer, inner
    ({'a': [1, 2]}, [1, 2])
    """
    if isinstance(old, list):
        old[:] = [_merged(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict):
        content = {key: _merged(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(content)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        old.clear()
        old.update(new)


def _merged(old: Any, new: Any) -> Any:
    if type(old) is type(new) and type(old) in KINDS:
        update(old, new)
        return old
    return new


def _is_small(container: Any) -> bool:
    pending, count = [container], 0
    while pending:
        value = pending.pop()
        count += 1
        if isinstance(value, (*KINDS, tuple)):
            if count + len(pending) + len(value) > MAX_VALUES:
                return False
            pending += [*value, *value.values()] if isinstance(value, dict) else value
    return True
