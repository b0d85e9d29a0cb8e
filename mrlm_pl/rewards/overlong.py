"""A soft punishment for answers that come close to the length limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from mrlm_pl.episode import Turn
from mrlm_pl.errors import ConfigurationError

TurnBonus: TypeAlias = Callable[[Turn], float] | None
"""Function that returns the addition to the environment's reward of a turn; None adds nothing."""


def overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0 up to ``max_tokens - buffer`` tokens, falling linearly to -1 at ``max_tokens`` (DAPO, arXiv 2503.14476).

    Args:
        tokens: length of the answer.
        max_tokens: length at which an answer is truncated.
        buffer: width of the slope, between 1 and ``max_tokens``.

    Raises:
        ConfigurationError: ``buffer`` is out of its range.

    >>> [overlong_penalty(tokens, 100, 20) for tokens in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer <= max_tokens:
        raise ConfigurationError(f"overlong_buffer is {buffer}; it must be between 1 and max_tokens ({max_tokens})")
    return max(min((max_tokens - buffer - tokens) / buffer, 0.0), -1.0)


def overlong_penalties(limits: Mapping[str, int], limit: int, buffer: int) -> Callable[[Turn], float]:
    """Return the function that gives the :func:`overlong_penalty` of a turn.

    Args:
        limits: maximum number of tokens of a turn by policy; a snapshot ``POLICY@VERSION`` has its policy's limit.
        limit: maximum number of tokens for other policies.
        buffer: width of the slope.

    Raises:
        ConfigurationError: ``buffer`` does not fit a limit.
    """
    for most in limits.values():
        overlong_penalty(0, most, buffer)

    def penalty(turn: Turn) -> float:
        snapshot_of = turn.policy.rpartition("@")[0]
        most = limits.get(turn.policy, limits.get(snapshot_of, limit))
        return overlong_penalty(turn.stop - turn.start, most, buffer)

    return penalty
