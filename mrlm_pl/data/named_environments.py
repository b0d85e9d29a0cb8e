"""The environments of a run under names of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mrlm_pl.environment import Environment, TaskSource
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError


class NamedTasks(TaskSource):
    """The tasks of a source under another name of their environment.

    Args:
        source: of the tasks.
        name: what their ``environment`` is to be.
    """

    def __init__(self, source: TaskSource, name: str) -> None:
        self.source, self.name, self.size = source, name, source.size

    def __getitem__(self, index: int) -> Task:
        return dataclasses.replace(self.source[index], environment=self.name)


def named_environments(environments: Sequence[Environment], names: Sequence[str] | None) -> dict[str, Environment]:
    """The environments by name.

    Args:
        environments: at least one.
        names: one for each; None is their own.

    Raises:
        ConfigurationError: the names are not as many as the environments, two share one, or one cannot be part of a
            metric's name.
    """
    for item in environments:
        if not isinstance(item, Environment):
            remedy = f"call it: {item.__name__}()" if isinstance(item, type) else "give an instance of its class"
            raise ConfigurationError(f"data.environment: {item!r:.80} is no environment; {remedy}")
    own = [item.name for item in environments]
    chosen = own if names is None else list(names)
    if len(chosen) != len(own):
        raise ConfigurationError(
            f"data.names are {chosen} for {len(own)} environments ({', '.join(own)}); give one for each, in their order"
        )
    if len(set(chosen)) != len(chosen):
        raise ConfigurationError(f"environments {chosen} share a name; give each one its own with data.names")
    for name in chosen:
        if not name or "/" in name:
            raise ConfigurationError(f"data.names: {name!r} cannot be a name; use letters, digits, '_' and '-'")
    return dict(zip(chosen, environments, strict=True))


def training_sources(environments: Mapping[str, Environment]) -> dict[str, TaskSource]:
    """The training tasks of each environment, under the name it has in the run."""
    found = {name: item.tasks("train") for name, item in environments.items()}
    return {
        name: source if environments[name].name == name else NamedTasks(source, name) for name, source in found.items()
    }
