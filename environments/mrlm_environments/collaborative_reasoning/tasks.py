"""The problems of collaborative reasoning: generated ones, or rows whose format is told by their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from random import Random
from typing import Any

from mrlm_environments.answers import FORMATS, Format
from mrlm_environments.collaborative_reasoning.inferences import (
    FORMS,
    generate_inference,
    inference_fields,
    inference_row,
)
from mrlm_environments.data_tasks import DataTasks
from mrlm_environments.math.environment import worked_problem
from mrlm_environments.math.problems import KINDS, MAX_DIFFICULTY, generate_problem
from mrlm_pl.environment import TaskSource
from mrlm_pl.environment.rows import BadRows
from mrlm_pl.errors import DataError
from mrlm_pl.settings import one_of, whole_range

MATH_FIELDS = ("question", "answer")


class ReasoningTasks:
    """Task sources of one environment; its copies share them.

    A task's data are ``format``, ``question`` (as it is posed), ``answer`` (as it is expected) and ``solution`` (a text
    that gives it).

    Args:
        environment: the environment's name.
        data: rows with GSM8K's fields or those of inferences: a file or a hub name, or a mapping from splits to these;
            None generates problems.
        form: which of the formats the rows are in, or the generated problems; None tells it of each row by its fields,
            and generates mathematics.
        difficulty: lowest and highest difficulty of generated mathematics, from 1 to 5.
        bad_rows: whether rows that cannot be used are skipped, with a warning that names them, or stop the run.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    def __init__(
        self,
        environment: str,
        data: str | dict[str, str] | None,
        form: Format | None,
        difficulty: tuple[int, int],
        bad_rows: BadRows,
    ) -> None:
        one_of(FORMATS, f"{environment}: ", format=form)
        self.difficulty = whole_range(1, MAX_DIFFICULTY, f"{environment}: ", difficulty=difficulty)
        self.form = form
        self._tasks = DataTasks(environment, data, bad_rows)

    def source(self, split: str) -> TaskSource:
        """Return the tasks of a split.

        Raises:
            DataError: the data cannot be read, or a row cannot be used.
            ConfigurationError: the split is unknown or empty.
        """
        generate = generate_inference if self.form == "nli" else self._generate
        fields = MATH_FIELDS if self.form == "math" else ()
        return self._tasks.source(split, generate, "key", fields, _identity, self._row)

    def _generate(self, rng: Random) -> dict[str, Any]:
        """Return the problems of the ``math`` environment; those of its training split are in this one's as well."""
        problem = generate_problem(rng, rng.choice(KINDS), rng.randint(*self.difficulty))
        return {"format": "math", **asdict(problem)}

    def _row(self, row: Mapping[str, Any], number: int, source: str) -> dict[str, Any] | None:
        form = self.form or _form_of(row, number, source)
        return inference_row(row, number, source) if form == "nli" else _math_row(row, number, source)


def _identity(row: Mapping[str, Any]) -> str:
    """Inferences from one premise belong together: who knew two of them would know more about the third."""
    fields = inference_fields(row)
    return str(row[fields[0]] if fields else row["question"])


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


def _math_row(row: Mapping[str, Any], number: int, source: str) -> dict[str, Any]:
    problem = worked_problem(row, number, f"collaborative_reasoning data {source!r}")
    return {"format": "math", **problem, "key": problem["question"]}
