"""Environments: one file each. They are imported when a name is used, and never bring torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrlm_environments.coordination import CoordinationGame
    from mrlm_environments.math import MathEnvironment
    from mrlm_environments.sql import SqlEnvironment

__all__ = ["CoordinationGame", "MathEnvironment", "SqlEnvironment"]

_HOME = {"CoordinationGame": "coordination", "MathEnvironment": "math", "SqlEnvironment": "sql"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
