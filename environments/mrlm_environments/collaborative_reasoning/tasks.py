"""The problems of collaborative reasoning: generated ones, or rows whose fields tell their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from random import Random
from typing import Any

from mrlm_environments.answers import Format
from mrlm_environments.collaborative_reasoning.inferences import FORMS, inference_fields, inference_row
from mrlm_environments.math.environment import worked_problem
from mrlm_environments.math.problems import KINDS, generate_problem
from mrlm_pl.errors import DataError

MATH_FIELDS = ("question", "answer")


def generate_math(rng: Random, difficulty: tuple[int, int]) -> dict[str, Any]:
    """Return a problem of the ``math`` environment; those of its training split are in this one's as well."""
    return {"format": "math", **asdict(generate_problem(rng, rng.choice(KINDS), rng.randint(*difficulty)))}


def identity(row: Mapping[str, Any]) -> str:
    """Return text that is equal for rows that must stay in one split: inferences from one premise belong together."""
    fields = inference_fields(row)
    return str(row[fields[0]] if fields else row["question"])


def task_data(row: Mapping[str, Any], number: int, source: str, form: Format | None) -> dict[str, Any] | None:
    """Return a task's data: ``format``, ``question``, ``answer`` (as expected) and ``solution`` (a text that gives it).

    Args:
        row: has GSM8K's fields or those of an inference.
        number: of the row, for messages.
        source: of the row, for messages.
        form: of the row; None tells it by the fields.

    Raises:
        DataError: the row cannot be used.
    """
    if (form or _form_of(row, number, source)) == "nli":
        return inference_row(row, number, source)
    problem = worked_problem(row, number, f"collaborative_reasoning data {source!r}")
    return {"format": "math", **problem, "key": problem["question"]}


def _form_of(row: Mapping[str, Any], number: int, source: str) -> Format:
    found: list[Format] = ["math"] if all(name in row for name in MATH_FIELDS) else []
    found += ["nli"] if inference_fields(row) else []
    if len(found) == 1:
        return found[0]
    known = f"math: {', '.join(MATH_FIELDS)}; nli: {' or '.join(map(', '.join, FORMS))}"
    fault = "fit both formats, say which by `format`" if found else "are those of no known format"
    raise DataError(
        f"collaborative_reasoning data {source!r}, row {number}: its fields {sorted(row)} {fault} ({known})"
    )
