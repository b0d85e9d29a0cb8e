"""The problems of collaborative reasoning: generated ones, or rows whose format is told by their fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from random import Random
from typing import Any

from mrlm_environments.answers import FORMATS, Format
from mrlm_environments.collaborative_reasoning.inferences import (
    FORMS,
    generate_inference,
    inference_fields,
    inference_row,
)
from mrlm_environments.math.environment import worked_problem
from mrlm_environments.math.problems import KINDS, MAX_DIFFICULTY, generate_problem
from mrlm_pl.environment import DatasetTasks, SeededTasks, TaskSource
from mrlm_pl.environment.rows import BadRows, read_split
from mrlm_pl.errors import ConfigurationError, DataError

logger = logging.getLogger(__name__)
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
        levels = tuple(difficulty)
        if len(levels) != 2 or not 1 <= levels[0] <= levels[1] <= MAX_DIFFICULTY:
            raise ConfigurationError(
                f"{environment}: difficulty is {difficulty!r}; give [lowest, highest] from 1 to {MAX_DIFFICULTY}"
            )
        if form is not None and form not in FORMATS:
            raise ConfigurationError(f"{environment}: format is {form!r}; use {' or '.join(FORMATS)}")
        self.environment, self.data, self.form, self.difficulty = environment, data, form, (levels[0], levels[1])
        self.bad_rows = bad_rows
        self._sources: dict[str, TaskSource] = {}

    def source(self, split: str) -> TaskSource:
        """The tasks of a split.

        Raises:
            DataError: the data cannot be read, or a row cannot be used.
            ConfigurationError: the split is unknown or empty.
        """
        if self.data is None:
            generate = generate_inference if self.form == "nli" else self._generate
            return SeededTasks(self.environment, split, generate, lambda data: data["key"])
        if split not in self._sources:
            fields = MATH_FIELDS if self.form == "math" else ()
            rows = read_split(self.data, split, fields, _identity, self._row, self.bad_rows)
            usable = [row for row in rows if row is not None]
            if len(usable) < len(rows):
                logger.warning("%s: %d rows of %r have no label", split, len(rows) - len(usable), self.data)
            self._sources[split] = DatasetTasks(self.environment, split, usable)
        return self._sources[split]

    def _generate(self, rng: Random) -> dict[str, Any]:
        """The problems of the ``math`` environment; those of its training split are in this one's as well."""
        problem = generate_problem(rng, rng.choice(KINDS), rng.randint(*self.difficulty))
        return {
            "format": "math",
            "question": problem.question,
            "answer": problem.answer,
            "solution": problem.solution,
            "key": problem.key,
        }

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
