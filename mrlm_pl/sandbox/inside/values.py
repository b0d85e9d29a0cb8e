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
_DICTIONARIES = (dict, Counter, OrderedDict, defaultdict)


@dataclass(frozen=True, eq=False)
class Opaque:
    """Something that stays in the candidate's process: its number there and its type's name. Equal to itself only."""

    number: int
    kind: str


def encode(value: Any, keep: Callable[[Any], Opaque], depth: int = 0) -> Any:
    """Return JSON-like data for a value.

    Args:
        value: value to pass.
        keep: remembers a value that cannot be passed, and returns its mention.
        depth: number of containers around the value.

    Raises:
        ValueError: containers are nested more than ``MAX_DEPTH`` deep.

    >>> encode((1, {2.5}), lambda value: Opaque(0, ""))
    {'tuple': [1, {'set': [{'float': '0x1.4000000000000p+1'}]}]}
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_DEPTH} deep")

    def inner(values: Any) -> list[Any]:
        return [encode(item, keep, depth + 1) for item in values]

    kind = type(value) if type(type(value)) is type else object  # other metaclasses may compare classes as they like
    if value is None or kind is bool or kind is str:
        return value
    if kind is int and -_EXACT < value < _EXACT:
        return value
    if kind is list:
        return inner(value)
    if kind in _DICTIONARIES:
        return {"dict": [inner(pair) for pair in dict.items(value)]}
    if kind is deque:
        return {"deque": [inner(value), value.maxlen]}
    if kind in _ITEMS:
        return {kind.__name__: inner(_ITEMS[kind][0](value))}
    name = value.__name__ if kind is type else ""
    if name and vars(builtins).get(name) is value:
        return {"type": name}
    if kind in _TEXTS and type(getattr(value, "tzinfo", None)) in (type(None), timezone):
        with suppress(TypeError, ValueError, AttributeError, RecursionError):  # an element that XML cannot hold
            return {kind.__name__: _TEXTS[kind][0](value)}
    mention = value if kind is Opaque else keep(value)
    return {"opaque": [mention.number, mention.kind]}


def decode(data: Any, recall: Callable[[Opaque], Any], depth: int = 0) -> Any:
    """Return the value that :func:`encode` was given.

    Args:
        data: JSON-like data.
        recall: returns the stand-in for a mention of a value that was not passed.
        depth: number of containers around the value.

    Raises:
        ValueError, TypeError, OverflowError, SyntaxError: the data is not what :func:`encode` makes.

    >>> decode({"tuple": [1, {"int": "0x20000000000000"}]}, lambda mention: mention)
    (1, 9007199254740992)
    """
    if depth > 2 * MAX_DEPTH:
        raise ValueError("data is nested too deep")

    def inner(items: Any) -> list[Any]:
        if type(items) is not list:
            raise TypeError(f"{type(items).__name__} instead of a list")
        return [decode(item, recall, depth + 1) for item in items]

    if type(data) is list:
        return inner(data)
    if type(data) is not dict:
        return data
    ((kind, content),) = data.items()
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](content)
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
            raise TypeError(f"{number!r:.40}, {name!r:.40} instead of a number and a name")
        return recall(Opaque(number, name))
    raise ValueError(f"unknown kind {kind!r:.40}")


def _type(content: Any) -> type:
    builtin_type = getattr(builtins, content)
    if type(builtin_type) is not type:
        raise ValueError(f"{content!r:.40} is not a built-in type")
    return builtin_type


def _complex(items: list[Any]) -> complex:
    real, imaginary = items
    return complex(real, imaginary)


_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (hex, lambda text: int(text, 16)),
    float: (float.hex, float.fromhex),
    bytes: (bytes.hex, bytes.fromhex),
    date: (date.isoformat, date.fromisoformat),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    ElementTree.Element: (lambda element: ElementTree.tostring(element, "unicode"), ElementTree.fromstring),
}
"""Types whose values are passed as texts, with the conversions to a text and from one."""

_ITEMS: dict[type, tuple[Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    tuple: (iter, tuple),
    set: (iter, set),
    frozenset: (iter, frozenset),
    complex: (lambda value: (value.real, value.imag), _complex),
    timedelta: (lambda value: (value.days, value.seconds, value.microseconds), lambda items: timedelta(*items)),
}
"""Types whose values are passed as lists of values, with both conversions."""

_FROM_TEXT = {kind.__name__: read for kind, (_, read) in _TEXTS.items()} | {"type": _type}
_FROM_ITEMS = {kind.__name__: read for kind, (_, read) in _ITEMS.items()}
