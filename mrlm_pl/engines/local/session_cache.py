"""Keys and values of finished turns, for the next turn of the same conversation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the start of both.

    >>> common_prefix((5, 6, 7), (5, 6, 8, 9))
    2
    """
    length = min(len(first), len(second))
    if tuple(first[:length]) == tuple(second[:length]):
        return length
    return next(n for n in range(length) if first[n] != second[n])


class SessionCache:
    """Least-recently-used cache of ``(policy, session) -> token ids and their keys and values``.

    Args:
        capacity: most bytes of keys and values; 0 keeps none.

    Attributes:
        size: bytes of the held keys and values.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[str, str], tuple[tuple[int, ...], Tensor]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, policy: str, session: str, token_ids: Sequence[int]) -> Tensor | None:
        """Return keys and values ``[layers, 2, KV heads, T, head size]`` of the longest stored prefix of ``token_ids``.

        T is below ``len(token_ids)``, so that a token is left to compute logits from. None if the session is unknown,
        or shares no token and is dropped.
        """
        entry = self._entries.get((policy, session))
        if entry is None:
            return None
        known, states = entry
        length = min(common_prefix(known, token_ids), len(token_ids) - 1)
        if length == 0:
            self._drop((policy, session))
            return None
        self._entries.move_to_end((policy, session))
        return states[:, :, :, :length]

    def put(self, policy: str, session: str, token_ids: Sequence[int], states: Tensor) -> None:
        """Store or replace a session; drop the least recently used ones for room."""
        self._drop((policy, session))
        if states.nbytes > self._capacity:
            return
        while self.size + states.nbytes > self._capacity:
            self._drop(next(iter(self._entries)))
        self._entries[policy, session] = tuple(token_ids), states
        self.size += states.nbytes

    def drop_policy(self, policy: str) -> None:
        """Drop all sessions of a policy."""
        for key in [key for key in self._entries if key[0] == policy]:
            self._drop(key)

    def release(self, prefix: str) -> None:
        """Drop the sessions whose key begins with ``prefix``, of all policies."""
        for key in [key for key in self._entries if key[1].startswith(prefix)]:
            self._drop(key)

    def clear(self) -> None:
        """Drop all sessions."""
        self.release("")

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry[1].nbytes
