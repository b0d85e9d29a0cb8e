"""Tasks from the rows of a data set, read once for each split, and what is wrong with a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrlm_pl.data.rows import read_split
from mrlm_pl.environment import DatasetTasks, TaskSource


class DataTasks:
    """The task sources of an environment's data; copies of the environment share what was read.

    Args:
        environment: the environment's name.
    """

    def __init__(self, environment: str) -> None:
        self.environment = environment
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
            DataError: the data cannot be read, a row lacks a field, or ``task_data`` refuses one.
            ConfigurationError: the split is unknown or empty.
        """
        if split not in self._sources:
            rows = read_split(data, split, fields, identity, task_data)
            self._sources[split] = DatasetTasks(self.environment, split, rows)
        return self._sources[split]


def fault_of(error: Exception) -> str:
    """What is wrong with a row, in words.

    >>> fault_of(KeyError("test")), fault_of(ValueError("test_list is empty"))
    ("the field 'test' is missing", 'ValueError: test_list is empty')
    """
    return f"the field {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
