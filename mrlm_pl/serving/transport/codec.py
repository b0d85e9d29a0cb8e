"""Records as JSON, and back, without loss of any type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
from google.protobuf.message import Message as ProtocolMessage

from mrlm_pl.environment import Message, Step
from mrlm_pl.environment.prompts import Prompt
from mrlm_pl.errors import RemoteError
from mrlm_pl.grouping import unique

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=ProtocolMessage)


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
    if isinstance(value, Prompt):
        raise RemoteError("whole conversations cannot be sent; run the environment where the policies are")
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise RemoteError(f"a value of type {type(value).__name__} cannot be sent; use JSON-like data")


def to_message(kind: type[MessageT], record: Any, **others: Any) -> MessageT:
    """Return a message of protobuf: the fields that are not among ``others`` are the record's of the same names."""
    same = [name for name in kind.DESCRIPTOR.fields_by_name if name not in others]
    return kind(**{name: getattr(record, name) for name in same}, **others)


def from_json(content: bytes, kind: type[T]) -> T:
    """Return the record of a type, or the container of records, that JSON holds; unknown fields are ignored.

    Raises:
        RemoteError: the content is not JSON, names a key twice, or is not of that type.

    >>> from_json(b'{"pro": {"role": "assistant", "content": "Yes."}}', dict[str, Message])["pro"].content
    'Yes.'
    """
    try:
        return msgspec.convert(json.loads(content.decode("utf-8", "surrogatepass"), object_pairs_hook=unique), kind)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise RemoteError(
            f"malformed content ({type(error).__name__}: {error}); it must be the JSON of a record"
        ) from error


_Amounts: TypeAlias = dict[str, bool | int | float]
"""Numbers by name; ``float`` alone would turn integers into floats and reject booleans."""


@dataclass(frozen=True)
class _StepRecord(Step):
    """A step's fields with the types that they have in JSON."""

    observations: dict[str, tuple[Message, ...]]
    rewards: _Amounts = field(default_factory=dict)
    components: dict[str, _Amounts] = field(default_factory=dict)
    metrics: _Amounts = field(default_factory=dict)

    def __post_init__(self) -> None:
        for amounts in (self.rewards, *self.components.values()):
            for name, amount in amounts.items():
                if not math.isfinite(amount):
                    raise ValueError(f"the reward {name!r:.100} is {amount}, and rewards are finite")


def step_from(content: bytes) -> Step:
    """Return an environment's step; see :func:`from_json`."""
    return Step(**vars(from_json(content, _StepRecord)))
