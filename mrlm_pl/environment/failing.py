"""Parts of an environment that fail: stand-ins for its sandboxes, judges, tools and functions."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import PurePath
from random import Random
from typing import Any

from mrlm_pl.environment.contract import Environment
from mrlm_pl.environment.trial import close, finished
from mrlm_pl.episode import Task

_DATA = (str, bytes, int, float, complex, set, frozenset, PurePath, Random, type(None), type)


class _Broken:
    """Stands for a part: it has its class and its data, and every call fails and is noted."""

    def __init__(self, whole: Any, uses: list[str]) -> None:
        self.__dict__.update(whole=whole, uses=uses)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__dict__["whole"])

    def __getattr__(self, name: str) -> Any:
        return broken(getattr(self.__dict__["whole"], name), self.__dict__["uses"])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.__dict__["uses"].append("call")
        raise ConnectionError("a part of the environment does not answer")


def failing_parts(environment: Environment, task: Task) -> list[str]:
    """Return the attributes that hold more than data during an episode: sandboxes, judges, tools, functions."""
    copied = environment.copy()
    finished(copied.reset(task))
    own = ("_order", "_inside")  # of the base class
    found = [name for name, value in vars(copied).items() if name not in own and broken(value, []) is not value]
    close(copied)
    return found


def broken(value: Any, uses: list[str]) -> Any:
    """Return a value with stand-ins for all that is more than data; their calls fail and are noted in ``uses``."""
    if isinstance(value, Mapping):
        made = {key: broken(item, uses) for key, item in value.items()}
        return made if any(made[key] is not value[key] for key in made) else value
    if type(value) in (list, tuple):
        items = [broken(item, uses) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    return value if isinstance(value, _DATA) or _is_record(value) else _Broken(value, uses)


def _is_record(value: Any) -> bool:
    """Return whether a value is a data class without methods, whose fields are data."""
    return (
        is_dataclass(value)
        and not any(callable(item) for name, item in vars(type(value)).items() if not name.startswith("_"))
        and all(broken(item, []) is item for item in vars(value).values())
    )
