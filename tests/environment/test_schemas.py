"""Schemas of others: refusals when they are listed, and an end of every check."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest

from mrlm_pl.environment import ToolSchema
from mrlm_pl.environment import schemas as json_schemas
from mrlm_pl.environment.schemas import schema_fault, value_fault
from mrlm_pl.environment.tools import argument_fault


def of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


META = "https://json-schema.org/draft/2020-12/schema"
FETCHING = ["http://127.0.0.1:9/x", "file:///etc/passwd", META, "x.json", "//h/x"]


@pytest.fixture(autouse=True)
def no_retrieval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(urllib.request, "urlopen", fetch := Mock(side_effect=OSError))
    yield
    fetch.assert_not_called()  # here, since an error would be caught as that of a reference


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
@pytest.mark.parametrize("reference", FETCHING)
def test_no_reference_is_fetched(keyword: str, reference: str) -> None:
    places = [{keyword: reference}, of({keyword: reference}), of({"anyOf": [{"not": {keyword: reference}}]})]
    places += [{"$id": reference, "properties": {"a": {keyword: "other.json"}}}, {"$defs": {"x": {keyword: reference}}}]
    for schema in places:
        assert "only references within the schema" in (schema_fault(schema) or "")
    hidden = {"default": {keyword: reference}, "properties": {"a": {"$ref": "#/default"}}}
    assert value_fault(hidden, {"a": 1}) is not None or reference == META


@pytest.mark.parametrize("keyword", ["default", "const", "examples", "enum"])
def test_a_reference_to_a_value_is_refused(keyword: str) -> None:
    """The keywords of a value are not checked, and this one would take 2**40 steps of `re`."""
    unchecked = {"unevaluatedProperties": False, "patternProperties": {"(a+)+$": {}}}
    value, place = (unchecked, keyword) if keyword in ("default", "const") else ([unchecked], f"{keyword}/0")
    for schema in (
        {keyword: value, "$ref": f"#/{place}"},
        {"$defs": {"x": {keyword: value, "$ref": f"#/$defs/x/{place}"}}},
    ):
        assert "which is not a schema" in (schema_fault(schema) or "")


@pytest.mark.long
def test_the_check_of_a_schema_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schemas, "SCHEMA_SECONDS", 0.05)
    large = {"anyOf": [{"prefixItems": [{}] * 50}] * 200}
    assert "could not be checked within 0.05 s" in (schema_fault(large) or "")


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ([], "it is not an object"),
        ({"type": "objekt"}, "at type: 'objekt'"),
        ({"properties": {"a": 3}}, "at properties/a: 3"),
        (of({"$ref": "#/$defs/missing"}), "refers to '#/$defs/missing', which it does not have"),
        (of({"pattern": "("}), "its pattern '(' cannot be read"),
        (of({"patternProperties": {"[": {}}}), "its pattern '[' cannot be read"),
        (of({"pattern": "a" * 501}), "at most 500 characters"),
        (of({"description": "x" * 200_000}), "longer than 100000 characters"),
        ({"unevaluatedProperties": False, "patternProperties": {"a": {}}}, "not supported"),
        (of({"pattern": "(?:(?:(?:a{1000}){1000}){1000}){1000}"}), "repeats too often"),
        (of({"pattern": "(?:(?:b+){00000000001000}){1000}"}), "repeats too often"),
        (of({"pattern": "(?ix)(?:a{1 0 0 0}){1 0 0 0}"}), "has the flag x"),
    ],
)
def test_schemas_that_cannot_be_used_are_told(schema: Any, fault: str) -> None:
    assert fault in (schema_fault(schema) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        of({"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "integer"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"x": {"items": [{}, {}]}}},
        of({"pattern": r"^\p{L}+\d$"}),
        of({"pattern": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"}),
        of({"pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})$"}),
        of({"$ref": "#/properties/enum"})
        | {"properties": {"enum": {"type": "array"}, "a": {"$ref": "#/$defs/t"}}}
        | {"$defs": {"t": True}},
        of({"enum": [{"$ref": "http://a"}], "default": {"pattern": "("}}),
        {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
        {"$id": "https://example.org/tool", "type": "object"},
        of({"type": "object", "additionalProperties": False, "patternProperties": {"^x": {"type": "integer"}}}),
    ],
)
def test_ordinary_schemas_are_taken(schema: Any) -> None:
    assert schema_fault(schema) is None


def test_null_is_a_value_of_what_is_nullable() -> None:
    nullable = {"properties": {"a": {"type": "string", "enum": ["b"], "nullable": True}, "c": {"type": "string"}}}
    tool = ToolSchema("t", "", nullable)
    assert argument_fault(tool, {"a": None, "c": "b"}) is None
    assert argument_fault(tool, {"a": 1}) is not None
    assert argument_fault(tool, {"c": None}) == "c: None is not of type 'string'"


def test_an_argument_that_the_tool_does_not_have_is_named() -> None:
    tool = ToolSchema("t", "", {"properties": {"a": {}}, "additionalProperties": False})
    assert argument_fault(tool, {"a": 1, "b": 2}) == "Additional properties are not allowed ('b' was unexpected)"


def doubled(levels: int) -> dict[str, Any]:
    """References of which each is followed twice, so that the work is 2 to the power of the levels."""
    both = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**both, f"d{levels}": {}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}


LONG = {"a": "x" * 50_000, "list": [{"n": n} for n in range(20_000)]}
SLOW = {
    "pattern": (of({"pattern": "^(x+x+)+y$"}), LONG),
    "names": ({"patternProperties": {"^(x+x+)+y$": {}}}, {"x" * 50_000: 1}),
    "other names": ({"patternProperties": {"^(x+x+)+y$": {}}, "additionalProperties": False}, {"x" * 50_000: 1}),
    "within": (of({"propertyNames": {"pattern": "^(x+x+)+y$"}}), {"a": {"x" * 50_000: 1}}),
    "references": (doubled(40), {"a": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLOW)
def test_the_check_of_arguments_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, arguments = SLOW[kind]
    assert schema_fault(schema) is None
    monkeypatch.setattr(json_schemas, "CHECK_SECONDS", 0.2)
    begun = time.monotonic()
    fault = argument_fault(ToolSchema("t", "", schema), arguments)
    assert time.monotonic() - begun < 100
    assert fault == "they could not be checked within 0.2 s"


def test_unique_items_are_found_without_comparing_each_with_each() -> None:
    schema = {"properties": {"list": {"uniqueItems": True}}}
    assert value_fault(schema, LONG) is None, "200 million comparisons would not end within CHECK_SECONDS"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, [[[]]] * 3, "\ud800", True, None])
@pytest.mark.parametrize("schema", [{"multipleOf": 0.01}, {"minimum": 1.5}, {"type": "integer"}, {"uniqueItems": True}])
def test_odd_values_are_faults_and_no_failures(value: Any, schema: Any) -> None:
    argument_fault(ToolSchema("t", "", of(schema)), {"a": value})


VALUES = [
    1,
    1.0,
    True,
    "a1",
    "x",
    "",
    [1, 1.0],
    [1, True],
    [{"a": 1}, {"a": 1.0}],
    {"x1": 1},
    {"x1": "s"},
    {"y": 2},
    {},
    None,
]
SCHEMAS = [
    {"uniqueItems": True},
    {"pattern": "[0-9]$"},
    {"patternProperties": {"^x": {"type": "integer"}}},
    {"patternProperties": {"^x": {}}, "additionalProperties": False},
    {"patternProperties": {"^x": {}}, "additionalProperties": {"type": "string"}},
    {"properties": {"y": {}}, "additionalProperties": False},
    {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "array", "uniqueItems": True}]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}], "additionalItems": False},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_values_are_judged_as_by_jsonschema(schema: Any) -> None:
    plain = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for value in VALUES:
        assert (value_fault(schema, value) is None) == plain.is_valid(value), value
