"""JSON schemas from elsewhere, such as those of a server's tools: checked once, and applied within bounds.

A schema is a small program: references can fetch files and pages, regular expressions can take forever, and references
to references can double the work with every level. Nothing is fetched here, and an application has a deadline.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
import referencing.jsonschema
import regex
from jsonschema.exceptions import ValidationError

MAX_SCHEMA_CHARACTERS = 100_000
MAX_PATTERN_CHARACTERS = 500
MAX_PATTERN_ITEMS = 1_000_000
"""Bound on the length of a pattern times its repetition counts, all of which its compilation may write out."""

SCHEMA_SECONDS = 5.0
"""Time for the check of a schema itself, which takes milliseconds as a rule."""

CHECK_SECONDS = 1.0
"""Time for the check of one value, which takes less than a millisecond as a rule."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_HOLD_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_HOLD_VALUES = ("enum", "const", "default", "examples", "required")

_COUNT = regex.compile(r"\{([0-9]+)")
_VERBOSE = regex.compile(r"\(\?[\w-]*x")

_PLAIN = jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"]
"""The keyword of all drafts, by the regular expressions of ``re``."""

_DEADLINE: ContextVar[float] = ContextVar("deadline")


def schema_fault(schema: Any) -> str | None:
    """Return the fault that makes a schema unfit for :func:`value_fault`, or None.

    >>> schema_fault({"type": "object", "properties": {"a": {"$ref": "http://example.org/a"}}})
    "it refers to 'http://example.org/a'; only references within the schema ('#/...') are followed"
    >>> schema_fault({"type": "objekt"})
    "at type: 'objekt' is not valid under any of the given schemas"
    """
    token = _DEADLINE.set(time.monotonic() + SCHEMA_SECONDS)
    try:
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
            return f"it is longer than {MAX_SCHEMA_CHARACTERS} characters"
        if not isinstance(schema, dict):
            return "it is not an object"
        schemas = list(_schemas(schema))
        for keyword, value in (pair for subschema in schemas for pair in subschema.items()):
            if fault := _keyword_fault(keyword, value, schemas):
                return fault
        dialect = _validator_class(schema).META_SCHEMA
        error = jsonschema.exceptions.best_match(_bounded(dialect).iter_errors(schema))
    except TimeoutError:
        return f"it could not be checked within {SCHEMA_SECONDS:g} s"
    except (RecursionError, ValueError, TypeError) as unreadable:
        return f"it cannot be read ({type(unreadable).__name__})"
    finally:
        _DEADLINE.reset(token)
    if error is None:
        return None
    path = "/".join(str(key) for key in error.absolute_path)
    return f"at {path or 'its top'}: {error.message[:200]}"


def value_fault(schema: Mapping[str, Any], value: Any) -> ValidationError | str | None:
    """Return the most telling error of a value by a schema, or why it cannot be checked; None when it is valid."""
    token = _DEADLINE.set(time.monotonic() + CHECK_SECONDS)
    try:
        return jsonschema.exceptions.best_match(_bounded(schema).iter_errors(value))
    except RecursionError:  # JSON that could just be read, but is too deep to be checked or shown
        return "they are nested too deeply"
    except TimeoutError:
        return f"they could not be checked within {CHECK_SECONDS:g} s"
    except (referencing.exceptions.Unresolvable, ValueError, TypeError, ArithmeticError, regex.error) as error:
        return f"they cannot be checked ({type(error).__name__})"  # such as NaN as a multiple of something
    finally:
        _DEADLINE.reset(token)


def _validator_class(schema: Any) -> Any:
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)


def _bounded(schema: Mapping[str, Any]) -> Any:
    """Return the validator of a schema, which fetches nothing and keeps the deadline."""
    return _bounded_class(_validator_class(schema))(dict(schema), registry=referencing.Registry())


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and the schemas in it."""
    if isinstance(value, list):
        for item in value:
            yield from _schemas(item)
    if not isinstance(value, dict):
        return
    yield value
    for keyword, child in value.items():
        if keyword in _HOLD_SCHEMAS_BY_NAME and isinstance(child, dict):
            yield from _schemas(list(child.values()))
        elif keyword not in _HOLD_VALUES:
            yield from _schemas(child)


def _keyword_fault(keyword: str, value: Any, schemas: Sequence[dict[str, Any]]) -> str | None:
    """Return the fault of a keyword of one of the schemas, of which the first holds the others."""
    if time.monotonic() > _DEADLINE.get():
        raise TimeoutError
    if keyword in _REFERENCES:
        if not isinstance(value, str) or not value.startswith("#"):
            return f"it refers to {str(value)[:100]!r}; only references within the schema ('#/...') are followed"
        resource = referencing.jsonschema.DRAFT202012.create_resource(schemas[0])
        try:
            target = referencing.Registry().with_resource("", resource).resolver().lookup(value).contents
        except (referencing.exceptions.Unresolvable, ValueError):
            return f"it refers to {value[:100]!r}, which it does not have"
        # A value, such as an example, may look like a schema, but its keywords were not checked.
        if not isinstance(target, bool) and not any(subschema is target for subschema in schemas):
            return f"it refers to {value[:100]!r}, which is not a schema"
    if keyword == "unevaluatedProperties" and any("patternProperties" in subschema for subschema in schemas):
        return "it has both unevaluatedProperties and patternProperties, which is not supported"
    patterns = [value] if keyword == "pattern" else list(value) if keyword == "patternProperties" else []
    return next((fault for pattern in patterns if (fault := _pattern_fault(pattern))), None)


def _pattern_fault(pattern: Any) -> str | None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARACTERS:
        return f"a pattern must be a text of at most {MAX_PATTERN_CHARACTERS} characters"
    if _VERBOSE.search(pattern):
        return f"its pattern {pattern[:100]!r} has the flag x, which is not supported"
    # Nesting is not read: a bound that holds for every nesting cannot be misled by the syntax around the counts.
    counts = [int(count.lstrip("0")[:9] or 1) for count in _COUNT.findall(pattern)]
    if len(pattern) * math.prod(counts) > MAX_PATTERN_ITEMS:
        return f"its pattern {pattern[:100]!r} repeats too often"
    try:
        regex.compile(pattern)
    except regex.error as error:
        return f"its pattern {pattern[:100]!r} cannot be read: {error}"
    return None


@cache
def _bounded_class(base: Any) -> Any:
    """Return the validator class with ``nullable``, and with a deadline for every keyword and regular expression."""
    keywords = {**base.VALIDATORS, "uniqueItems": _unique_items, "additionalProperties": _additional_properties}
    keywords |= {"pattern": _pattern, "patternProperties": _pattern_properties}
    return jsonschema.validators.extend(base, {name: _with_deadline(check) for name, check in keywords.items()})


def _with_deadline(check: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
    def run(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if time.monotonic() > _DEADLINE.get():
            raise TimeoutError
        # transformers writes ``Optional`` as OpenAPI's ``nullable``, which JSON Schema does not have.
        if instance is not None or schema.get("nullable") is not True:
            yield from check(validator, value, instance, schema) or ()

    return run


def _matches(pattern: str, text: str) -> bool:
    seconds_left = max(_DEADLINE.get() - time.monotonic(), 0.001)
    return regex.search(pattern, text, timeout=seconds_left) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, subschema in patterns.items():
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Yield the keyword, which leaves out the properties that a pattern of ``patternProperties`` finds."""
    if validator.is_type(instance, "object"):
        patterns = schema.get("patternProperties", {})
        others = {name: value for name, value in instance.items() if not any(_matches(each, name) for each in patterns)}
        yield from _PLAIN(validator, subschema, others, {"properties": schema.get("properties", {})})


def _unique_items(validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if unique and validator.is_type(instance, "array"):
        seen = {_canonical(item) for item in instance}
        if len(seen) < len(instance):
            yield ValidationError("the items are not unique")


def _canonical(value: Any) -> str:
    """Equal for values that JSON Schema takes for equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return json.dumps(sorted([name, _canonical(item)] for name, item in value.items()))
    if isinstance(value, list):
        return json.dumps([_canonical(item) for item in value])
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
