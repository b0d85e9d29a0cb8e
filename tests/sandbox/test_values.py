"""Values between a candidate and its grader: nothing is lost, and nothing that is malformed is read."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrlm_pl.sandbox.inside.values import MAX_DEPTH, Opaque, decode, encode

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
HASHABLE = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3))
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(st.text(), inner).map(list), max_size=2).map(lambda pairs: {"dict": pairs})
        | st.tuples(st.booleans() | st.integers() | inner, st.text() | inner).map(lambda pair: {"opaque": list(pair)})
        | st.dictionaries(
            st.sampled_from(
                ["int", "float", "bytes", "tuple", "set", "frozenset", "complex", "dict", "opaque", "other"]
            ),
            inner,
            max_size=2,
        )
    ),
)


def no_object(value: Any) -> Opaque:
    raise AssertionError(f"{value!r} is a plain value")


def passed(value: Any) -> Any:
    """Return the value that arrives."""
    return decode(json.loads(json.dumps(encode(value, no_object))), lambda mention: mention)


PLAIN = {type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Opaque}


def types_in(value: Any) -> set[type]:
    """Return the exact types of a value and of all that it holds."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    return {type(value)}.union(*map(types_in, inner))


def form(value: Any) -> Any:
    """Return a value with its types for comparisons: NaN equals itself, 0.0 is not -0.0, and 1 is not True."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind in (list, tuple):
        return kind, [form(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted(repr(form(item)) for item in value)
    if kind is dict:
        return kind, [(form(key), form(item)) for key, item in value.items()]
    return kind, value


@given(VALUES)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    assert form(passed(value)) == form(value)


@given(JSON)
def test_data_is_read_or_refused(data: Any) -> None:
    def recalled(mention: Opaque) -> Opaque:
        assert (type(mention.number), type(mention.kind)) == (int, str)
        return mention

    try:
        value = decode(data, recalled)
    except (ValueError, TypeError):
        return
    assert types_in(value) <= PLAIN


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"int": "0x1", "float": "0x1p0"},
        {"int": "five"},
        {"int": 5},
        {"float": "five"},
        {"float": "0x1p99999"},
        {"float": 0.5},
        {"bytes": "xy"},
        {"bytes": [1]},
        {"tuple": "ab"},
        {"tuple": {"int": "0x1"}},
        {"set": [[1]]},
        {"frozenset": None},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"dict": 7},
        {"complex": [1]},
        {"complex": [1, 2, 3]},
        {"opaque": [1]},
        {"opaque": ["one", "object"]},
        {"opaque": [float("inf"), "object"]},
        {"code": "print(1)"},
    ],
)
def test_malformed_data_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        decode(data, lambda mention: mention)


def test_dictionaries_of_the_library_arrive_as_plain_ones() -> None:
    for value in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        assert type(passed(value)) is dict
        assert passed(value) == {"a": 2, "b": 1}


@pytest.mark.parametrize("kind", [int, str, float, list, dict, tuple, set, bytes])
def test_subclasses_are_not_values(kind: type) -> None:
    made = type("Disguise", (kind,), {"__eq__": lambda self, other: True, "__hash__": lambda self: 0})()
    kept: list[Any] = []

    def keep(value: Any) -> Opaque:
        kept.append(value)
        return Opaque(len(kept) - 1, type(value).__name__)

    data = encode([made], keep)
    assert data == [{"opaque": [0, "Disguise"]}]
    assert kept[0] is made


@pytest.mark.parametrize("methods", [{"__eq__": lambda cls, other: True}, {"__eq__": bool, "__hash__": lambda cls: 1}])
def test_a_class_that_compares_as_it_likes_is_no_value(methods: dict[str, Any]) -> None:
    made = type("Meta", (type,), methods)("Disguise", (), {})()
    assert encode([made], lambda value: Opaque(0, type(value).__name__)) == [{"opaque": [0, "Disguise"]}]


def test_a_mention_of_an_object_leads_back_to_it() -> None:
    mention = Opaque(3, "Tree")
    data = encode([mention], no_object)
    assert decode(data, lambda found: (found.number, found.kind)) == [(3, "Tree")]
    assert mention != Opaque(3, "Tree")


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_values_are_not_nested_without_end() -> None:
    assert passed(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match="nested more than 60 deep"):
        encode(nested(MAX_DEPTH + 1), no_object)
    with pytest.raises(ValueError, match="nested too deep"):
        decode(nested(500), lambda mention: mention)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested"):
        encode(endless, no_object)
