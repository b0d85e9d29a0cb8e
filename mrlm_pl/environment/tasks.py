"""Sources of tasks: data sets and generators, by split."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.seeding import derive_seed, keyed_random
from mrlm_pl.settings import ChecksArguments

SPLITS = ("train", "validation", "test")


class Shared(ChecksArguments):
    """Base of objects that the copies of an environment share: a deep copy is the object itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class TaskSource(Shared, ABC):
    """The tasks of one split: a sized data set, or an endless generator that is a function of the index.

    Sources are immutable; copies of an environment share them.
    """

    size: int | None = None
    """Number of tasks, or None for an endless source."""

    @abstractmethod
    def __getitem__(self, index: int) -> Task:
        """Return the task at ``index``, the same one every time.

        Raises:
            IndexError: the index is negative, or beyond the end of a sized source.
        """

    def __iter__(self) -> Iterator[Task]:
        for index in itertools.count() if self.size is None else range(self.size):
            yield self[index]

    def _check_index(self, index: int) -> None:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"task index {index} is outside a source of {self.size if self.size else 'endless'} tasks")


class DatasetTasks(TaskSource):
    """Sized source over rows of data; row ``i`` becomes the task with index ``i``.

    Args:
        environment: the environment's name.
        split: the split's name.
        rows: JSON-like mapping of each task.
        numbers: row number of each task in the data set, from 1; None if unknown.

    Raises:
        ConfigurationError: there is no row.
    """

    def __init__(
        self, environment: str, split: str, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int] | None = None
    ) -> None:
        if not rows:
            raise ConfigurationError(f"environment {environment!r} has no task in split {split!r}; give it data")
        self.environment, self.split, self.rows, self.numbers = environment, split, rows, numbers
        self.size = len(rows)

    def __getitem__(self, index: int) -> Task:
        self._check_index(index)
        seed = derive_seed("task", self.environment, self.split, index)
        return Task(self.environment, self.split, index, seed, self.rows[index])


class SeededTasks(TaskSource):
    """Endless source of generated tasks, disjoint between splits by content.

    The generator is called with a random generator keyed by (environment, split, index, attempt) and returns the
    task's data. ``identity(data)`` names the problem; its hash decides which split the problem belongs to (a tenth
    each for validation and test), and candidates of other splits are drawn again. So a held-out problem can never be
    met in training, whatever the seeds.

    Args:
        environment: the environment's name.
        split: ``train``, ``validation`` or ``test``.
        generate: makes one problem's data from a ``random.Random``.
        identity: text that is equal for equal problems.

    Raises:
        ConfigurationError: the split is unknown, or the generator's problems are so few that none falls into it.
    """

    MAX_ATTEMPTS = 10_000

    def __init__(
        self,
        environment: str,
        split: str,
        generate: Callable[[random.Random], Mapping[str, Any]],
        identity: Callable[[Mapping[str, Any]], str],
    ) -> None:
        if split not in SPLITS:
            raise ConfigurationError(f"environment {environment!r} has no split {split!r}; use {', '.join(SPLITS)}")
        self.environment, self.split, self.generate, self.identity = environment, split, generate, identity

    def __getitem__(self, index: int) -> Task:
        self._check_index(index)
        for attempt in range(self.MAX_ATTEMPTS):
            data = self.generate(keyed_random("task", self.environment, self.split, index, attempt))
            if split_of(self.identity(data)) == self.split:
                seed = derive_seed("task", self.environment, self.split, index)
                return Task(self.environment, self.split, index, seed, data)
        raise ConfigurationError(
            f"environment {self.environment!r}: none of {self.MAX_ATTEMPTS} generated problems belongs to split "
            f"{self.split!r}; widen the generator's range"
        )


def split_of(identity: str) -> str:
    """Return the split that a problem belongs to, by the hash of its text: 8 in 10 ``train``, 1 each of the others.

    >>> sorted({split_of(str(n)) for n in range(100)})
    ['test', 'train', 'validation']
    """
    bucket = derive_seed("split", identity) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"
