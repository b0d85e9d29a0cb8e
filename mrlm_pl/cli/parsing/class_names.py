"""Lets a value name a class by its class name, and an environment by its short name, wherever a class is expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jsonargparse._typehints as jsonargparse_types

from mrlm_pl.environment import Environment
from mrlm_pl.errors import nearest, place_of
from mrlm_pl.runs.plugins import class_path, dotted_path, environments_by_name, imported, subclasses

MOST_NAMES = 20
"""More names than this are not listed when one of them is near."""


@dataclass(frozen=True)
class UnknownName:
    """A value that should have named a class of ``base``, and does not."""

    base: type
    name: str

    def explain(self) -> str:
        """What is wrong, the nearest name and all names."""
        known = sorted(known_names(self.base), key=str.lower)
        near = nearest(self.name, [*known, *(cls.__name__ for cls in subclasses(self.base) if _public(cls))])
        message = f"there is no {_kind(self.base)} {self.name!r}; "
        if near:
            message += f"did you mean {near!r}?"
        if near and len(known) > MOST_NAMES:
            return message
        return f"{message} Known are: {', '.join(known)}" if near else f"{message}known are: {', '.join(known)}"


def known_names(base: type) -> list[str]:
    """What may be written where a ``base`` is expected: short names for environments, class names for all others."""
    if issubclass(base, Environment):
        return list(environments_by_name())
    classes = [base, *subclasses(base)]
    return [cls.__name__ for cls in classes if not getattr(cls, "__abstractmethods__", None) and _public(cls)]


@contextmanager
def short_class_names() -> Iterator[list[UnknownName]]:
    """While it is open, parsers resolve short names of environments and policies that are a model's name alone.

    Yields the names that nothing has.

    The parser library looks up class names in one function and offers no hook, so that function is replaced. It alone
    knows which class a value is expected to be: a string parameter called ``environment`` stays a string.
    """
    library_lookup = jsonargparse_types.resolve_class_path_by_name
    library_file = jsonargparse_types.adapt_subconfig_path
    unknown: list[UnknownName] = []

    def resolve(base: type | tuple[type, ...], name: str) -> str:
        name = dotted_path(name)
        if "." in name:
            found = imported(name)  # the message has the place, which the library drops
            missing = sorted(getattr(found, "__abstractmethods__", ()))
            if missing:
                raise ImportError(f"{name} does not define {', '.join(missing)}; add what is missing{place_of(found)}")
        path = library_lookup(base, name)  # type: ignore[arg-type]
        if "." in path:
            return path
        bases = base if isinstance(base, tuple) else (base,)
        environments = environments_by_name() if any(_is_class(item, Environment) for item in bases) else {}
        if name in environments:
            return class_path(environments[name])
        unknown.extend(UnknownName(item, name) for item in bases if isinstance(item, type) and item.__subclasses__())
        return path

    def from_file(value: Any, typehint: Any, options: Any) -> Any:
        found = library_file(value, typehint, options)
        if found is not jsonargparse_types.not_a_subconfig_path or not _is_model(value, typehint):
            return found
        return jsonargparse_types.adapt_typehints({"model": value}, typehint, **options)

    jsonargparse_types.resolve_class_path_by_name = resolve  # type: ignore[assignment]
    jsonargparse_types.adapt_subconfig_path = from_file
    try:
        yield unknown
    finally:
        jsonargparse_types.resolve_class_path_by_name = library_lookup
        jsonargparse_types.adapt_subconfig_path = library_file


def _is_model(value: Any, typehint: Any) -> bool:
    """Whether a policy is given by its model alone: a hub id, a folder or ``builtin:...``, none of which is a class."""
    wanted = getattr(typehint, "__name__", "") == "Policy" and isinstance(value, str)
    return wanted and ("/" in value or value.startswith("builtin:")) and ".py:" not in value


def _kind(base: type) -> str:
    names = {
        "Environment": "environment",
        "Algorithm": "algorithm",
        "LightningDataModule": "data module",
        "Callback": "callback",
        "Logger": "logger",
    }
    return names.get(base.__name__, base.__name__)


def _is_class(item: Any, base: type) -> bool:
    return isinstance(item, type) and issubclass(item, base)


def _public(cls: type) -> bool:
    return not cls.__name__.startswith("_") and "<locals>" not in cls.__qualname__
