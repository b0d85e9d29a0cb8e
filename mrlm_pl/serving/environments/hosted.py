"""The environments of a server, by name: their instances and tasks."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc

from mrlm_pl.environment import Environment, TaskSource
from mrlm_pl.environment.hosts import EnvironmentHosts
from mrlm_pl.environment.trial import close
from mrlm_pl.serving.transport.connection import RefusalError

logger = logging.getLogger(__name__)

Factory = Callable[[Mapping[str, Any]], Environment]
"""Makes an environment with a client's settings, which override the server's."""


@dataclass(frozen=True)
class _Variant:
    """An environment with the settings of clients, and its tasks by split."""

    environment: Environment
    sources: dict[str, TaskSource] = field(default_factory=dict)


class Offer:
    """Environments by name.

    Args:
        factories: factory of each environment.
        processes: number of host processes for the instances; 0 keeps them in the server's process.
        step_seconds: deadline of a call in a host process.
        settings: hashes of each environment's class and settings, by which clients detect servers that differ.
    """

    MAX_VARIANTS = 64
    """Number of kept environments; the oldest is dropped for a new one."""

    def __init__(
        self,
        factories: Mapping[str, Factory],
        processes: int,
        step_seconds: float,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.factories, self.settings = dict(factories), settings
        self._hosts = EnvironmentHosts(processes, step_seconds) if processes else None
        self._lock = threading.Lock()
        self._variants: dict[tuple[str, str], Future[_Variant]] = {}

    def template(self, name: str, settings: Mapping[str, Any]) -> Environment:
        """Return the environment of a name with a client's settings, made once; blocks while it is made.

        Raises:
            RefusalError: there is no environment of that name.
        """
        return self._variant(name, settings).environment

    def source(self, name: str, settings: Mapping[str, Any], split: str) -> TaskSource:
        """Return the tasks of a split; blocks while data is read.

        Raises:
            RefusalError: there is no environment of that name.
        """
        variant = self._variant(name, settings)
        if split not in variant.sources:
            variant.sources[split] = variant.environment.tasks(split)
        return variant.sources[split]

    def close(self) -> None:
        """Close all environments and end the host processes; may be called twice."""
        with self._lock:
            variants, self._variants = list(self._variants.values()), {}
        for making in variants:
            if making.done() and making.exception() is None:
                _close(making.result().environment)
        if self._hosts is not None:
            self._hosts.close()

    def _variant(self, name: str, settings: Mapping[str, Any]) -> _Variant:
        if name not in self.factories:
            names = ", ".join(sorted(self.factories)) or "none"
            raise RefusalError(
                grpc.StatusCode.NOT_FOUND, f"there is no environment {name[:100]!r} here; there are {names}"
            )
        key = (name, repr(sorted(settings.items())))
        with self._lock:
            is_new = key not in self._variants
            making = self._variants.setdefault(key, Future())
        if is_new:
            try:
                variant = _Variant(self._make(name, settings))
            except BaseException as error:  # all that wait for it raise it
                with self._lock:
                    self._variants.pop(key, None)  # clients may try any number of settings
                making.set_exception(error)
            else:
                self._keep(key, making, variant)
        return making.result()

    def _make(self, name: str, settings: Mapping[str, Any]) -> Environment:
        environment = self.factories[name](settings)
        if self._hosts is not None and not inspect.iscoroutinefunction(environment.step):
            return self._hosts.host(environment)
        return environment

    def _keep(self, key: tuple[str, str], making: Future[_Variant], variant: _Variant) -> None:
        """Keep a variant as the newest, whenever it was begun, and drop the oldest one beyond the bound."""
        with self._lock:
            self._variants.pop(key, None)
            self._variants[key] = making
            making.set_result(variant)
            complete = [key for key, making in self._variants.items() if making.done()]
            dropped = self._variants.pop(complete[0]) if len(complete) > self.MAX_VARIANTS else None
        if dropped is not None:
            _close(dropped.result().environment)


def _close(environment: Environment) -> None:
    """Close an environment of which only copies have played."""
    try:
        close(environment)
    except Exception as error:  # an environment may raise anything
        logger.warning("closing the environment %s: %s", environment.name, error)
