"""A reward function."""

from collections.abc import Mapping
from typing import Any


def brief_reply(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 for a reply of at most ten characters, else 0."""
    return float(len(reply) <= 10)
