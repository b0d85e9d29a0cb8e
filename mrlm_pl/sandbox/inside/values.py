"""Plain values as JSON without loss of type: what may pass between a candidate and its grader.

Numbers, text, bytes, dates, times, XML elements, built-in types and containers are passed by value and by exact type,
so an object that claims to be equal to everything arrives as an :class:`Opaque` mention of something that stayed
behind.
"""

from __future__ import annotations

import builtins
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from typing import Any
from xml.etree import ElementTree

MAX_DEPTH = 60
_EXACT = 2**53  # beyond it, JSON readers elsewhere lose digits
_MOMENTS: dict[str, Any] = {kind.__name__: kind for kind in (date, datetime, time)}
_DICTIONARIES = (dict, Counter, OrderedDict, defaultdict)


@dataclass(frozen=True, eq=False)
class Opaque:
    """Something that stays in the candidate's process: its number there and its type's name. Equal to itself only."""

    number: int
    kind: str


def encode(value: Any, keep: Callable[[Any], Opaque], depth: int = 0) -> Any:
    """Return JSON-like data for a value.

    Args:
        value: to pass.
        keep: remembers a value that cannot be passed, and returns its mention.
        depth: of the containers around it.

    Raises:
        ValueError: containers are nested more than ``MAX_DEPTH`` deep.

    >>> encode((1, {2.5}), lambda value: Opaque(0, ""))
    {'tuple': [1, {'set': [{'float': '0x1.4000000000000p+1'}]}]}
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_DEPTH} deep")

    def inner(values: Any) -> list[Any]:
        return [encode(item, keep, depth + 1) for item in values]

    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is list:
        return inner(value)
    if kind is tuple or kind is set or kind is frozenset:
        return {kind.__name__: inner(value)}
    if kind in _DICTIONARIES:
        return {"dict": [inner(pair) for pair in dict.items(value)]}
    if kind is deque:
        return {"deque": [inner(value), value.maxlen]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": inner((value.real, value.imag))}
    name = getattr(value, "__name__", "") if kind is type else ""
    if name and vars(builtins).get(name) is value:
        return {"type": name}
    if kind is timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if kind in _MOMENTS.values() and type(getattr(value, "tzinfo", None)) in (type(None), timezone):
        return {kind.__name__: value.isoformat()}
    if kind is ElementTree.Element:
        with suppress(TypeError, ValueError, AttributeError, RecursionError):  # it holds what cannot be written as XML
            return {"element": ElementTree.tostring(value, "unicode")}
    mention = value if kind is Opaque else keep(value)
    return {"opaque": [mention.number, mention.kind]}


def decode(data: Any, recall: Callable[[Opaque], Any], depth: int = 0) -> Any:
    """Return the value that :func:`encode` was given.

    Args:
        data: JSON-like data.
        recall: what stands for a mention of something that was not passed.
        depth: of the containers around it.

    Raises:
        ValueError, TypeError, SyntaxError: the data is not what :func:`encode` makes.

    >>> decode({"tuple": [1, {"int": "0x20000000000000"}]}, lambda mention: mention)
    (1, 9007199254740992)
    """
    if depth > 2 * MAX_DEPTH:
        raise ValueError("data is nested too deep")

    def inner(items: Any) -> list[Any]:
        if type(items) is not list:
            raise TypeError(f"{type(items).__name__} in place of a list")
        return [decode(item, recall, depth + 1) for item in items]

    if type(data) is list:
        return inner(data)
    if type(data) is not dict:
        return data
    ((kind, content),) = data.items()
    if kind in _FROM_CONTENT:
        return _FROM_CONTENT[kind](content)
    if kind in _FROM_ITEMS:
        return _FROM_ITEMS[kind](inner(content))
    if kind == "dict":
        return dict(inner(pair) for pair in content)
    if kind == "deque":
        items, longest = content
        return deque(inner(items), longest)
    if kind == "opaque":
        number, name = content
        if type(number) is not int or type(name) is not str:
            raise TypeError(f"{number!r:.40}, {name!r:.40} in place of a number and a name")
        return recall(Opaque(number, name))
    raise ValueError(f"unknown kind {kind!r:.40}")


def _float(content: Any) -> float:
    try:
        return float.fromhex(content)
    except OverflowError as error:
        raise ValueError("a float that is too large") from error


def _type(content: Any) -> type:
    named = getattr(builtins, content)
    if type(named) is not type:
        raise ValueError(f"{content!r:.40} is no built-in type")
    return named


def _complex(items: list[Any]) -> complex:
    real, imaginary = items
    return complex(real, imaginary)


_FROM_CONTENT: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": _float,
    "bytes": bytes.fromhex,
    "element": ElementTree.fromstring,
    "type": _type,
    **{name: kind.fromisoformat for name, kind in _MOMENTS.items()},
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "complex": _complex,
    "timedelta": lambda items: timedelta(*items),
}
