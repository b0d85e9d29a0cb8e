"""The environment contract.

An environment is a small program: it poses a :class:`Task`, hands each agent that acts next its new messages, receives
their answers and returns a :class:`Step`. Turn-based, simultaneous and mixed play are all "who gets an observation acts
next". One instance plays one episode at a time; the framework copies the instance (``copy.deepcopy``) for episodes that
run at the same time, so keep the configuration in ``__init__`` and make the episode's state in ``reset``.

This module imports the standard library only, so an environment can be hosted without torch.
"""

from __future__ import annotations

import copy
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mrlm_pl.environment.steps import ORDER_OF_CALLS, Observations, Step, are_numbers, describe, with_call_order
from mrlm_pl.environment.tasks import SeededTasks, TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, source_line, source_line_of_class
from mrlm_pl.settings import ChecksArguments

S = TypeVar("S", bound="SingleAgentEnvironment")


@dataclass(frozen=True)
class ToolSchema:
    """A tool of an agent: name, description, and its arguments as a JSON schema object."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def to_chat(self) -> dict[str, Any]:
        """Return the schema in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class UnnamedEnvironmentError(ConfigurationError, AttributeError):
    """An environment class has no ``name``; ``hasattr`` and introspection see a missing attribute."""


class _NoName:
    """Stands for ``name`` until a subclass sets it."""

    def __get__(self, instance: Environment | None, owner: type[Environment]) -> str:
        raise UnnamedEnvironmentError(
            f'environment class {owner.__name__} has no name; write `name = "{_snake_case(owner.__name__)}"` in its '
            f"body{source_line_of_class(owner)}"
        )


class Environment(ChecksArguments, ABC):
    """Base class of all environments. Methods may be ``async``.

    The base class keeps the order of calls: it checks the arguments of ``step`` and the results of ``reset``, ``step``
    and ``tasks`` around the methods of every subclass (see :class:`TurnOrder`). A wrapper that forwards the calls to
    another environment declares ``class Mine(Environment, proxy=True)``; it and its subclasses are not checked.

    Class attributes:
        name: short name, used in task keys, metrics and on the command line.
        agents: the agents that take part, in a fixed order.
        quick: True if ``step`` takes well under a millisecond for any reply and never blocks. A server then calls it
            without a thread, in half the time, and without a deadline.
        forks: True if :meth:`copy` in the middle of an episode returns an instance that continues from there. One with
            processes or connections cannot; a turn tree then replays the earlier turns.
        client_settings: arguments that the clients of a server may set where it allows settings. Name none that holds
            a path, an address, an object or a bound that protects the server.
        whole_prompts: observations are :class:`~mrlm_pl.environment.prompts.Prompt`, which no server can send.
        secrets: fields of a task's data that no agent may see; ``check-env --level semantic`` searches for them.
    """

    name: str = _NoName()  # type: ignore[assignment]
    agents: tuple[str, ...] = ("agent",)
    quick: bool = False
    forks: bool = False
    client_settings: tuple[str, ...] = ()
    whole_prompts: bool = False
    secrets: tuple[str, ...] = ("answer", "answers", "label", "solution", "gold", "reference", "test", "tests")

    _proxy = False

    def __init_subclass__(cls, *, proxy: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._proxy = cls._proxy or proxy
        if isinstance(named := vars(cls).get("agents"), str):
            raise EnvironmentContractError(f"{cls.__name__}.agents is {named!r}; give a tuple, as in `({named!r},)`")
        if cls._proxy:
            return
        for name, wrapper in ORDER_OF_CALLS.items():
            method = cls.__dict__.get(name)
            if inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False):
                setattr(cls, name, wrapper(method))

    @abstractmethod
    def reset(self, task: Task) -> Observations:
        """Begin an episode: messages for each agent that acts first. Deterministic in the task."""

    @abstractmethod
    def step(self, actions: Mapping[str, Message]) -> Step:
        """Judge the decisions of the agents that were due.

        Raises:
            EnvironmentContractError: no episode is running, or the agents are not those that are due.
        """

    @abstractmethod
    def tasks(self, split: str) -> TaskSource:
        """Return the task source of a split (``train``, ``validation`` or ``test``); the splits share no problem."""

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the tools that an agent may call; none by default."""
        return ()

    def identity(self, task: Task) -> str | None:
        """Return text that is equal for equal problems; ``check-env`` demands that no two splits share one.

        None if tasks do not differ, as in a game that always begins with the same board: splits may then share them.
        Default: the ``identity`` of :class:`SeededTasks`, else an empty text: ``check-env`` then compares the first
        observations.
        """
        source = self.tasks(task.split)
        return source.identity(task.data) if isinstance(source, SeededTasks) else ""

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return replies that earn the highest reward, turn after turn for each agent, or None if none are known."""
        return None

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the returns of worthless and of the best replies, each the sum over all agents, or None if unknown."""
        return None

    def majority(self, task: Task, replies: Sequence[str]) -> bool | None:
        """Return whether the most frequent answer of the replies is right; None if the task has no vote."""
        return None

    def close(self) -> None:
        """Free the environment's resources; may be called twice."""

    @with_call_order
    def copy(self) -> Environment:
        """Return an independent instance with the same settings, for an episode that runs at the same time.

        Raises:
            EnvironmentContractError: the instance holds something that cannot be copied.
        """
        try:
            return copy.deepcopy(self)
        except Exception as error:  # attributes may raise anything
            cause = self._uncopied()
            raise EnvironmentContractError(
                f"environment {self.name!r} cannot be copied: {cause}{type(error).__name__}: {error}; make all but "
                f"plain settings in reset{', set `forks = False`' if self.forks else ''} or write a copy method"
                f"{source_line_of_class(type(self))}"
            ) from error

    def _uncopied(self) -> str:
        """Return the first attribute that cannot be copied, for a message."""
        for name, value in vars(self).items():
            try:
                copy.deepcopy(value)
            except Exception:  # as above
                return f"its attribute {name!r}: "
        return ""


def _snake_case(name: str) -> str:
    """Return a class's name as a short name.

    >>> _snake_case("MyGameEnvironment")
    'my_game'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Environment") or name).lower()


@dataclass(frozen=True)
class Outcome:
    """A single-agent environment's answer to one reply.

    Args:
        components: named parts of the reward; the reward is their sum.
        observation: the next user message, or several messages; None ends the episode.
        stop_reason: reason why the episode ended, when it did.
        truncated: whether a limit ended the episode.
        success: whether the task was solved, when it ended.
        metrics: named numbers for the log.
    """

    components: Mapping[str, float] = field(default_factory=dict)
    observation: str | Message | Sequence[Message] | None = None
    stop_reason: str = "answered"
    truncated: bool = False
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class SingleAgentEnvironment(Environment):
    """An environment with one agent, written with plain values: ``begin`` poses the task, ``reply`` judges a text.

    Both are plain functions and run in a thread, so they may wait. To await, subclass :class:`Environment`.

    Raises:
        ConfigurationError: one of them is ``async``.
    """

    @abstractmethod
    def begin(self, task: Task) -> str | Message | Sequence[Message]:
        """Return the first message or messages; a plain string is a user message."""

    @abstractmethod
    def reply(self, message: Message) -> Outcome:
        """Judge the agent's message; ``message.content`` is its text."""

    def __new__(cls: type[S], *args: Any, **kwargs: Any) -> S:
        # Not when the class is defined: its whole module would fail, with all the other environments in it.
        for method in (cls.begin, cls.reply):
            if inspect.iscoroutinefunction(method):
                raise ConfigurationError(
                    f"{cls.__name__}.{method.__name__} is async; write a plain function, which runs in a thread of its "
                    "own, or subclass Environment, whose reset and step may be async"
                )
        return super().__new__(cls)

    def reset(self, task: Task) -> Observations:
        """Begin an episode; see :meth:`Environment.reset`."""
        return {self.agents[0]: self._as_messages(self.begin(task), self.begin)}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Judge the one agent's message; see :meth:`Environment.step`."""
        agent = self.agents[0]
        outcome = self.reply(actions[agent])
        if not isinstance(outcome, Outcome):
            raise EnvironmentContractError(
                f"environment {self.name!r}: reply returned {describe(outcome)}; return an Outcome, as in "
                f'`Outcome({{"right": 1.0}})` ({source_line(self.reply)})'
            )
        components = outcome.components
        if not are_numbers(components):
            raise EnvironmentContractError(
                f"environment {self.name!r}: the components of the Outcome are {describe(components)}; give numbers by "
                f'name, as in `Outcome({{"right": 1.0}})` ({source_line(self.reply)})'
            )
        done = outcome.observation is None
        return Step(
            observations={} if done else {agent: self._as_messages(outcome.observation, self.reply)},
            components={agent: dict(components)},
            done=done,
            stop_reason=outcome.stop_reason if done else "",
            truncated=done and outcome.truncated,
            success=outcome.success if done else None,
            metrics=outcome.metrics,
        )

    def _as_messages(self, observation: Any, method: Callable[..., Any]) -> tuple[Message, ...]:
        """Return the messages that a method returned; a string is the user's."""
        if isinstance(observation, str):
            return (Message("user", observation),)
        messages = (observation,) if isinstance(observation, Message) else observation
        if isinstance(messages, Sequence) and all(isinstance(message, Message) for message in messages):
            return tuple(messages)
        raise EnvironmentContractError(
            f"environment {self.name!r}: {method.__name__} returned the observation {describe(observation)}; return "
            f"text, a Message or a list of them ({source_line(method)})"
        )
