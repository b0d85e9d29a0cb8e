"""The tasks of an environment: generated, or rows of a data set; their first messages and the end of a team's play."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from mrlm_pl.environment import DatasetTasks, Message, SeededTasks, Step, TaskSource
from mrlm_pl.environment.rows import Rows, read_split
from mrlm_pl.environment.tasks import Shared

logger = logging.getLogger(__name__)


class DataTasks(Shared):
    """Task sources of an environment that generates its tasks or reads them from a data set.

    Args:
        environment: the environment's name.
        data: rows, a file or a hub name, or a mapping from splits to these; None generates the tasks.
        form: the form of a row, for messages; by default its required fields.
    """

    def __init__(self, environment: str, data: Rows | Mapping[str, Rows] | None, form: str = "") -> None:
        self.environment, self.data, self.form = environment, data, form
        self._sources: dict[str, TaskSource] = {}
        self._read: dict[Any, dict[str, list[tuple[int, Any]]]] = {}

    def source(
        self,
        split: str,
        fields: Sequence[str],
        task_data: Callable[[Mapping[str, Any]], dict[str, Any] | None],
        identity: Callable[[Mapping[str, Any]], str] | None = None,
        generate: Callable[[Random], Mapping[str, Any]] | None = None,
        key: str = "",
    ) -> TaskSource:
        """Return the tasks of a split; the rows of a data set are read once.

        Args:
            split: name of the split.
            fields: names that every row of a data set must have.
            task_data: makes a task's data from a row; None for a row without a label.
            identity: text of a row that is equal for equal problems; None is that of the first field.
            generate: makes the data of a generated task; None for an environment that always has data.
            key: field of generated data that is equal for equal problems.

        Raises:
            DataError: the data cannot be read, or no row of it can be used.
            ConfigurationError: the split is unknown or empty.
        """
        if self.data is None:
            assert generate is not None, "it has data"
            return SeededTasks(self.environment, split, generate, lambda data: str(data[key]))
        if split not in self._sources:
            named = identity or (lambda row: str(row[fields[0]]))
            rows = read_split(self.data, split, fields, named, task_data, self.form, self._read)
            labeled = {number: data for number, data in rows if data is not None}
            if len(labeled) < len(rows):
                logger.warning("%s: %d rows of %r have no label", split, len(rows) - len(labeled), self.data)
            self._sources[split] = DatasetTasks(self.environment, split, list(labeled.values()), list(labeled))
        return self._sources[split]


def opening(text: str, system_prompt: str, instruction: str = "") -> list[Message]:
    """Return the first messages of an episode: the system prompt, if any, and the task with its instruction.

    >>> [message.content for message in opening("1+1?", "Be brief.", "Give a number.")]
    ['Be brief.', '1+1?\\nGive a number.']
    """
    posed = Message("user", f"{text}\n{instruction}" if instruction else text)
    return [Message("system", system_prompt), posed] if system_prompt else [posed]


def ending(
    agents: Iterable[str], components: Mapping[str, float], reason: str, success: bool, metrics: Mapping[str, float]
) -> Step:
    """Return the last step of an episode in which all of these agents earn the same; ``max_turns`` truncates it."""
    return Step(
        components={agent: dict(components) for agent in agents},
        done=True,
        stop_reason=reason,
        truncated=reason == "max_turns",
        success=success,
        metrics=metrics,
    )


def check_modules(code: Iterable[str], packages: Iterable[str], name: str) -> None:
    """Check that code imports nothing that the sandbox does not have.

    Args:
        code: Python of the task's own.
        packages: modules beyond the standard library that may be imported.
        name: name of the object that needs the modules, for the message.

    Raises:
        ValueError: a module is missing.
    """
    nodes = [node for text in code for node in ast.walk(ast.parse(text))]
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    missing = sorted({module.partition(".")[0] for module in imported} - sys.stdlib_module_names - set(packages))
    if missing:
        raise ValueError(
            f"{name} needs {', '.join(missing)}, which the sandbox does not have; let it in: sandbox.packages: "
            f"[{', '.join(missing)}]"
        )
