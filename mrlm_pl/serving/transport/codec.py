"""Records as JSON, and back, without loss of any type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

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
        RemoteError: the content is not JSON, or not of that record.
    """
    try:
        return make(json.loads(content.decode("utf-8", "surrogatepass")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RemoteError(
            f"malformed content ({type(error).__name__}: {error}); it must be the JSON of a record"
        ) from error


def settings_from(content: bytes) -> dict[str, Any]:
    """Return the arguments of an environment."""
    return from_json(content or b"{}", dict)


def task_from(value: Mapping[str, Any]) -> Task:
    """Return the task with these fields; its numbers are integers."""
    return Task(
        str(value["environment"]), str(value["split"]), int(value["index"]), int(value["seed"]), dict(value["data"])
    )


def messages_from(values: Sequence[Any]) -> tuple[Message, ...]:
    """Return chat messages."""
    return msgspec.convert(values, tuple[Message, ...])


def observations_from(values: Mapping[str, Any]) -> dict[str, tuple[Message, ...]]:
    """Return observations by agent."""
    return {agent: messages_from(messages) for agent, messages in values.items()}


def actions_from(values: Mapping[str, Any]) -> dict[str, Message]:
    """Return actions by agent."""
    return msgspec.convert(values, dict[str, Message])


def tools_from(values: Mapping[str, Any]) -> dict[str, tuple[ToolSchema, ...]]:
    """Return the schemas of tools by agent."""
    return {agent: tuple(ToolSchema(**schema) for schema in schemas) for agent, schemas in values.items()}


def step_from(value: Mapping[str, Any]) -> Step:
    """Return an environment's step."""
    return Step(**{**value, "observations": observations_from(value["observations"])})
