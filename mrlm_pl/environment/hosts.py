"""Environments in host processes: for judges with long computations, that hold the interpreter lock, or may crash.

A host process keeps many instances and steps one at a time; several hosts work in parallel. What happens in a host
stays there: when it dies or hangs, its episodes fail (and are retried elsewhere) and another host takes its place.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from mrlm_pl.environment.contract import Environment, ToolSchema
from mrlm_pl.environment.steps import Observations, Step, describe
from mrlm_pl.environment.tasks import TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import EnvironmentContractError

_DROP, _MAKE = "drop", "make"
STARTUP_SECONDS = 60.0


class EnvironmentHosts:
    """A fixed number of host processes, started when they are first needed.

    Args:
        count: number of host processes.
        timeout: seconds that one call may take before its host is stopped.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self.timeout = timeout
        self._hosts: list[_Host | None] = [None] * count
        self._next = itertools.count()
        self._lock = threading.Lock()

    def host(self, environment: Environment) -> _HostedEnvironment:
        """Return an environment that acts like ``environment`` and lives in a host process.

        Raises:
            EnvironmentContractError: the environment cannot be pickled, so it cannot be sent to another process.
        """
        try:
            return _HostedEnvironment(environment, pickle.dumps(environment), self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvironmentContractError(
                f"environment {environment.name!r} cannot be sent to a process ({error}); "
                "make it picklable or set data.processes to 0"
            ) from error

    def take(self) -> _Host:
        """Return a live host, the next in turn."""
        with self._lock:
            slot = next(self._next) % len(self._hosts)
            host = self._hosts[slot]
            if host is None or not host.alive:
                host = self._hosts[slot] = _Host(self.timeout)
            return host

    def close(self) -> None:
        """Stop all hosts; may be called twice."""
        with self._lock:
            for host in filter(None, self._hosts):
                host.stop()
            self._hosts = [None] * len(self._hosts)


class _HostedEnvironment(Environment, proxy=True):
    """Stands in for an environment whose instance lives in a host process; made by :class:`EnvironmentHosts`."""

    def __init__(self, template: Environment, packed: bytes, hosts: EnvironmentHosts) -> None:
        self.name, self.agents = template.name, template.agents
        self._template, self._packed, self._hosts = template, packed, hosts
        self._host: _Host | None = None
        self._instance = -1

    def copy(self) -> Environment:
        return _HostedEnvironment(self._template, self._packed, self._hosts)

    def tasks(self, split: str) -> TaskSource:
        return self._template.tasks(split)

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        return self._template.tools(agent)

    def reset(self, task: Task) -> Observations:
        if self._host is None or not self._host.alive:
            host = self._hosts.take()
            self._instance = host.make(self._packed)
            self._host = host
        return self._host.ask(self._instance, "reset", task)

    def step(self, actions: Mapping[str, Message]) -> Step:
        if self._host is None:
            raise EnvironmentContractError(f"environment {self.name!r}: step was called before reset; call reset first")
        return self._host.ask(self._instance, "step", dict(actions))

    def close(self) -> None:
        host, self._host = self._host, None
        if host is not None and host.alive:
            host.ask(self._instance, _DROP, None)


class _Host:
    """One process and the pipe to it."""

    def __init__(self, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.timeout = timeout
        self._pipe, host_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(host_end,), name="environment-host", daemon=True)
        self._process.start()
        host_end.close()
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def make(self, packed: bytes) -> int:
        number = next(self._numbers)
        self.ask(number, _MAKE, packed, extra=STARTUP_SECONDS)
        return number

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def ask(self, instance: int, method: str, argument: Any, *, extra: float = 0.0) -> Any:
        timeout = self.timeout + extra
        timeout_error = TimeoutError(
            f"the environment did not answer within {timeout} s and its host process was stopped; "
            "raise the deadline (`step_timeout`, on a server `step_seconds`) or correct the environment"
        )
        with self._lock:
            try:
                self._pipe.send((instance, method, argument))
                in_time = self._pipe.poll(timeout)
                failed, value = self._pipe.recv() if in_time else (True, timeout_error)
            except (EOFError, OSError) as error:
                self.stop()
                raise ConnectionError("the environment's host process died or was stopped") from error
            if not in_time:
                self.stop()
        if failed:
            raise value
        return value


def _picklable_error(error: Exception) -> Exception:
    """Return the error if it can be pickled, else one of the contract with its name and text."""
    with suppress(Exception):  # a class with its own constructor may raise anything here
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return EnvironmentContractError(f"{type(error).__name__}: {error}")


def _serve(pipe: Connection) -> None:
    """Answer one request after the other until the pipe closes; runs in the host process."""
    instances: dict[int, Environment] = {}
    while True:
        try:
            number, method, argument = pipe.recv()
        except EOFError:
            return
        value = None
        try:
            if method == _MAKE:
                instances[number] = pickle.loads(argument)
            elif method == _DROP:
                instances.pop(number).close()
            else:
                value = getattr(instances[number], method)(argument)
            pipe.send((False, value))  # raises before it sends what cannot be pickled
        except Exception as error:  # an environment may raise anything
            if value is not None:
                error = EnvironmentContractError(f"{describe(value)} cannot be sent between processes: {error}")
            pipe.send((True, _picklable_error(error)))
