"""Tasks from the rows of a data set, read once for each split, and what is wrong with a row."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mrlm_pl.environment import DatasetTasks, TaskSource
from mrlm_pl.environment.rows import BadRows, read_split


class DataTasks:
    """The task sources of an environment's data; copies of the environment share what was read.

    Args:
        environment: the environment's name.
        bad_rows: whether rows that cannot be used are skipped, with a warning that names them, or stop the run.
    """

    def __init__(self, environment: str, bad_rows: BadRows) -> None:
        self.environment, self.bad_rows = environment, bad_rows
        self._sources: dict[str, TaskSource] = {}

    def source(
        self,
        data: str | Mapping[str, str],
        split: str,
        fields: Sequence[str],
        identity: Callable[[Mapping[str, Any]], str],
        task_data: Callable[[Mapping[str, Any], int, str], dict[str, Any]],
    ) -> TaskSource:
        """The tasks of a split.

        Args:
            data: a file or a hub name, or a mapping from splits to these; always the same one.
            split: its name.
            fields: names that every row must have.
            identity: text that is equal for equal problems.
            task_data: makes a task's data of a row; its number and its source are for messages.

        Raises:
            DataError: the data cannot be read, or a row cannot be used and ``bad_rows`` is ``stop``, or no row can.
            ConfigurationError: the split or ``bad_rows`` is unknown, or the split is empty.
        """
        if split not in self._sources:
            rows = read_split(
                data, split, fields, identity, lambda *row: (row[1], task_data(*row)), bad_rows=self.bad_rows
            )
            made, numbers = [task for _, task in rows], [number for number, _ in rows]
            self._sources[split] = DatasetTasks(self.environment, split, made, numbers)
        return self._sources[split]


def fault_of(error: Exception) -> str:
    """What is wrong with a row, in words.

    >>> fault_of(KeyError("test")), fault_of(ValueError("test_list is empty"))
    ("the field 'test' is missing", 'ValueError: test_list is empty')
    """
    return f"the field {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def check_modules(code: Iterable[str], packages: Iterable[str], name: str) -> None:
    """Check that code imports nothing that the sandbox does not have.

    Args:
        code: Python of the task's own.
        packages: modules beyond the standard library that may be imported.
        name: of what needs the modules, for the message.

    Raises:
        ValueError: a module is missing.
    """
    found: set[str] = set()
    for text in code:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    missing = sorted(found - sys.stdlib_module_names - set(packages))
    if missing:
        raise ValueError(
            f"{name} needs {', '.join(missing)}, which the sandbox does not have; let it in: sandbox.packages: "
            f"[{', '.join(missing)}]"
        )
