"""What a server offers: environments by name, their instances, and how their methods are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mrlm_pl.environment import Environment, TaskSource
from mrlm_pl.hosting import EnvironmentHosts

Factory = Callable[[Mapping[str, Any]], Environment]
"""Makes an environment of a client's settings; they override the server's."""


class UnknownEnvironmentError(Exception):
    """The server has no environment of that name."""


class Offer:
    """Environments by name.

    Args:
        factories: how each is made.
        processes: host processes for their instances; 0 keeps them in the server's.
        step_seconds: that a call of one may take, where it is in a host process.
    """

    MAX_VARIANTS = 64
    """Environments with settings of clients that are kept; the oldest is closed for a new one."""

    def __init__(self, factories: Mapping[str, Factory], processes: int, step_seconds: float) -> None:
        self.factories = dict(factories)
        self._hosts = EnvironmentHosts(processes, step_seconds) if processes else None
        self._templates: dict[tuple[str, str], Environment] = {}
        self._sources: dict[tuple[str, str, str], TaskSource] = {}

    def template(self, name: str, settings: Mapping[str, Any]) -> Environment:
        """The environment of a name with a client's settings, made once; blocks while it is made.

        Raises:
            UnknownEnvironmentError: there is none of that name.
        """
        if name not in self.factories:
            raise UnknownEnvironmentError(f"there is no environment {name[:100]!r} here; there are {self.names()}")
        key = (name, repr(sorted(settings.items())))
        if key not in self._templates:
            environment = self.factories[name](settings)
            if self._hosts is not None and not inspect.iscoroutinefunction(environment.step):
                environment = self._hosts.host(environment)
            if len(self._templates) >= self.MAX_VARIANTS:
                del self._templates[next(iter(self._templates))]
            self._templates[key] = environment
        return self._templates[key]

    def source(self, name: str, settings: Mapping[str, Any], split: str) -> TaskSource:
        """The tasks of a split; blocks while data is read.

        Raises:
            UnknownEnvironmentError: there is no environment of that name.
        """
        key = (name, repr(sorted(settings.items())), split)
        if key not in self._sources:
            self._sources[key] = self.template(name, settings).tasks(split)
        return self._sources[key]

    def names(self) -> str:
        """The names, for messages."""
        return ", ".join(sorted(self.factories))

    def close(self) -> None:
        """End the host processes."""
        if self._hosts is not None:
            self._hosts.close()
