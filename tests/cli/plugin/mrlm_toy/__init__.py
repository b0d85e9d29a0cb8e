"""A third party's plugin, with lazy exports."""

import importlib
from typing import Any

__all__ = ["ParrotEnvironment", "ToyAlgorithm", "ToyData", "WrappedEnvironment", "brief_reply"]

_HOME = {
    "ParrotEnvironment": "environments",
    "ToyAlgorithm": "training",
    "ToyData": "training",
    "WrappedEnvironment": "environments",
    "brief_reply": "rewards",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
