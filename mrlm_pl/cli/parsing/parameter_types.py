"""The types of a parameter, by its annotation."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

KINDS: dict[Any, str] = {int: "an integer such as 2", float: "a number such as 0.5", bool: "true or false"}
"""Names of plain types in messages."""

_DTYPE = "dtype"  # of torch, whose instances have paths
_NO_SETTINGS = {*sys.stdlib_module_names, "jsonargparse"}
"""Packages whose classes are values, not classes that a configuration names."""


def members_of(annotation: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for item in get_args(annotation) for member in members_of(item)]
    bare = Callable in (annotation, get_origin(annotation)) and not get_args(annotation)
    return [Callable[..., Any] if bare else annotation]


def inner_type(members: Sequence[Any], mapping: bool) -> Any:
    """Return the type of the values of a mapping, else of the items of a list; ``Any`` without such a type."""
    for member in members:
        origin = get_origin(member)
        if isinstance(origin, type) and issubclass(origin, Iterable) and issubclass(origin, Mapping) == mapping:
            return get_args(member)[-1]
    return Any


def classes_among(members: Sequence[Any]) -> list[type]:
    """Return the classes among the types of a parameter that a configuration names or has settings of."""
    classes = [item for item in members if isinstance(item, type) and item.__name__ != _DTYPE]
    return [cls for cls in classes if cls.__module__.partition(".")[0] not in _NO_SETTINGS]


def factory_classes(members: Sequence[Any]) -> list[type]:
    """Return the classes whose instances a function without arguments is to make: one of them may be named for it."""
    return classes_among([get_args(member)[-1] for member in members if get_args(member)[:1] == ([],)])


def literal_values(members: Sequence[Any]) -> list[Any]:
    """Return the values that the literal types among those of a parameter have."""
    return [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]


def takes_functions(members: Sequence[Any]) -> bool:
    """Return whether a parameter takes functions."""
    return any(get_origin(member) is Callable for member in members)


def is_plain(value: Any, members: Sequence[Any]) -> bool:
    """Return whether a value may be one of the plain types of a parameter, rather than a class or settings."""
    texts = any(member is str or get_origin(member) is Literal for member in members)
    return texts or (bool in members and str(value).lower() in ("true", "false"))


def type_name(member: Any) -> str:
    """Return the name of a type in a message."""
    if get_origin(member) is tuple:
        return "a list" if ... in get_args(member) else f"a list of {len(get_args(member))} values"
    if get_origin(member) is Sequence:
        return "list"
    if get_origin(member) in (dict, Mapping):
        return "a mapping, as in `{NAME: VALUE}`"
    if get_origin(member) is Callable:
        return "a function (its import path `package.function`, or its name in a plugin)"
    if getattr(member, "__name__", "") == _DTYPE:
        return "a dtype, as in `torch.bfloat16`"
    return KINDS.get(member, getattr(member, "__name__", str(member)))
