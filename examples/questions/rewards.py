"""Reward functions of configs/tasks/questions.yaml."""

import re
from collections.abc import Mapping
from typing import Any


def exact(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the reply is the row's answer, else 0."""
    return float(re.findall(r"\d+", reply)[-1:] == [row["answer"]])


def brevity(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 for an empty reply, falling to 0 at 32 characters."""
    return max(0.0, 1 - len(reply) / 32)
