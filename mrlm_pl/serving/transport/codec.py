"""Records as JSON, and back, without loss of any type."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from mrlm_pl.environment import Step, ToolSchema
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import RemoteError

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Return a record, or a container of records and JSON-like values, as JSON. Tuples become lists.

    Raises:
        RemoteError: a value has another type, a mapping has a key that is not text, or the nesting is too deep.

    >>> to_json({"a": [True, 1, 1.0, None, "x", 2**70]})
    b'{"a": [true, 1, 1.0, null, "x", 1180591620717411303424]}'
    """
    try:
        _check_keys(value)
        return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"a value cannot be sent as JSON: {error}") from error


def _check_keys(value: Any) -> None:
    """Raise for keys that JSON would turn into text."""
    value = vars(value) if is_dataclass(value) else value
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RemoteError(f"the key {key!r} is not text; mappings are sent with text as keys")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise RemoteError(f"a value of type {type(value).__name__} cannot be sent; use JSON-like data")


def from_json(content: bytes, make: Callable[[Any], T]) -> T:
    """Return the record that ``make`` makes of JSON.

    Raises:
        RemoteError: the content is not JSON, names a key twice, or is not of that record.
    """
    try:
        return make(json.loads(content.decode("utf-8", "surrogatepass"), object_pairs_hook=_unique))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise RemoteError(
            f"malformed content ({type(error).__name__}: {error}); it must be the JSON of a record"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, whose keys must differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:100]!r} comes twice")
    return found


def settings_from(content: bytes) -> dict[str, Any]:
    """Return the arguments of an environment."""
    return from_json(content or b"{}", lambda values: msgspec.convert(values, dict[str, Any]))


def task_from(value: Any) -> Task:
    """Return the task with these fields; unknown ones are ignored."""
    return msgspec.convert(value, Task)


def messages_from(values: Any) -> tuple[Message, ...]:
    """Return chat messages."""
    return msgspec.convert(values, tuple[Message, ...])


def observations_from(values: Any) -> dict[str, tuple[Message, ...]]:
    """Return observations by agent."""
    return msgspec.convert(values, dict[str, tuple[Message, ...]])


def actions_from(values: Any) -> dict[str, Message]:
    """Return actions by agent."""
    return msgspec.convert(values, dict[str, Message])


def tools_from(values: Any) -> dict[str, tuple[ToolSchema, ...]]:
    """Return the schemas of tools by agent."""
    return msgspec.convert(values, dict[str, tuple[ToolSchema, ...]])


_Amounts: TypeAlias = dict[str, bool | int | float]
"""Numbers by name; ``float`` alone would turn integers into floats and refuse truth values."""


@dataclass(frozen=True)
class _StepRecord(Step):
    """A step's fields with the types that they have in JSON."""

    observations: dict[str, tuple[Message, ...]]
    rewards: _Amounts = field(default_factory=dict)
    components: dict[str, _Amounts] = field(default_factory=dict)
    metrics: _Amounts = field(default_factory=dict)


def step_from(value: Any) -> Step:
    """Return an environment's step; unknown fields are ignored."""
    record = msgspec.convert(value, _StepRecord)
    for amounts in (record.rewards, *record.components.values()):
        for name, amount in amounts.items():
            if not math.isfinite(amount):
                raise ValueError(f"the reward {name!r:.100} is {amount}, and rewards are finite")
    return Step(**vars(record))
