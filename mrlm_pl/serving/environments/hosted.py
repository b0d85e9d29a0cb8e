"""The environments of a server, by name: their instances and tasks."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from mrlm_pl.environment import Environment, TaskSource
from mrlm_pl.environment.hosts import EnvironmentHosts
from mrlm_pl.serving.environments.sessions import RefusalError

logger = logging.getLogger(__name__)

Factory = Callable[[Mapping[str, Any]], Environment]
"""Makes an environment with a client's settings, which override the server's."""


class Offer:
    """Environments by name.

    Args:
        factories: of the environments.
        processes: host processes for their instances; 0 keeps them in the server's.
        step_seconds: deadline of a call in a host process.
    """

    MAX_VARIANTS = 64
    """Number of kept environments; the oldest is dropped for a new one."""

    def __init__(self, factories: Mapping[str, Factory], processes: int, step_seconds: float) -> None:
        self.factories = dict(factories)
        self._hosts = EnvironmentHosts(processes, step_seconds) if processes else None
        self._lock = threading.Lock()
        self._making: dict[tuple[str, str], threading.Lock] = {}
        self._templates: dict[tuple[str, str], Environment] = {}
        self._sources: dict[tuple[str, str, str], TaskSource] = {}

    def template(self, name: str, settings: Mapping[str, Any]) -> Environment:
        """Return the environment of a name with a client's settings, made once; blocks while it is made.

        Raises:
            RefusalError: there is none of that name.
        """
        if name not in self.factories:
            there = ", ".join(sorted(self.factories))
            raise RefusalError(
                grpc.StatusCode.NOT_FOUND, f"there is no environment {name[:100]!r} here; there are {there}"
            )
        key = (name, repr(sorted(settings.items())))
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:  # others may be made meanwhile
            found = self._templates.get(key)
            if found is None:
                try:
                    found = self._make(name, settings)
                except BaseException:
                    with self._lock:
                        self._making.pop(key, None)  # clients may try any number of settings
                    raise
                self._keep(key, found)
            return found

    def source(self, name: str, settings: Mapping[str, Any], split: str) -> TaskSource:
        """Return the tasks of a split; blocks while data is read.

        Raises:
            RefusalError: there is no environment of that name.
        """
        template = self.template(name, settings)
        key = (name, repr(sorted(settings.items())), split)
        source = self._sources.get(key)
        if source is None:
            source = template.tasks(split)
            with self._lock:
                self._sources[key] = source
        return source

    def _make(self, name: str, settings: Mapping[str, Any]) -> Environment:
        environment = self.factories[name](settings)
        if self._hosts is not None and not inspect.iscoroutinefunction(environment.step):
            return self._hosts.host(environment)
        return environment

    def _keep(self, key: tuple[str, str], environment: Environment) -> None:
        dropped: Environment | None = None
        with self._lock:
            if len(self._templates) >= self.MAX_VARIANTS:
                oldest = next(iter(self._templates))
                dropped = self._templates.pop(oldest)
                self._making.pop(oldest, None)
                self._sources = {key: source for key, source in self._sources.items() if key[:2] != oldest}
            self._templates[key] = environment
        if dropped is not None:
            _close(dropped)

    def close(self) -> None:
        """Close all environments and end the host processes; may be called twice."""
        with self._lock:
            templates, self._templates = list(self._templates.values()), {}
            self._making.clear()
            self._sources.clear()
        for template in templates:
            _close(template)
        if self._hosts is not None:
            self._hosts.close()


def _close(environment: Environment) -> None:
    """Close an environment of which only copies have played."""
    try:
        closing = environment.close()  # type: ignore[func-returns-value]  # a coroutine where it is async
        if inspect.iscoroutine(closing):
            asyncio.run(closing)
    except Exception as error:  # an environment may raise anything
        logger.warning("closing the environment %s: %s", environment.name, error)
