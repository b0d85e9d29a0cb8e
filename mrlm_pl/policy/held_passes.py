"""How many tokens the forward passes hold that wait for the same backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_HELD: ContextVar[list[int] | None] = ContextVar("held_tokens", default=None)


@contextmanager
def bounded_together() -> Iterator[None]:
    """Within the context the passes of all models count together towards their bounds.

    A team's policies and critics make one forward pass each and then share a backward pass: without this the memory
    would be that of all passes.
    """
    token = _HELD.set([0])
    try:
        yield
    finally:
        _HELD.reset(token)


def hold(tokens: int, most: int) -> bool:
    """Whether a pass of so many tokens may be held; it then counts. The first may be, as may all outside the context.

    >>> with bounded_together():
    ...     print(hold(700, 1000), hold(400, 1000), hold(300, 1000))
    True False True
    """
    held = _HELD.get()
    if held is None:
        return True
    if held[0] and held[0] + tokens > most:
        return False
    held[0] += tokens
    return True
