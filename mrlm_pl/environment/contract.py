"""The environment contract: observations, rewards and the end of an episode.

An environment is a small program: it poses a :class:`Task`, hands each agent that acts next its new messages, receives
their answers and returns a :class:`Step`. Turn-based, simultaneous and mixed play are all "who gets an observation acts
next". One instance plays one episode at a time; the framework copies the instance (``copy.deepcopy``) for episodes that
run at the same time, so keep the configuration in ``__init__`` and make the episode's state in ``reset``.

This module imports the standard library only, so an environment can be hosted without torch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, SupportsFloat, TypeAlias

from mrlm_pl.environment.tasks import SeededTasks, TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, NonFiniteError, place, place_of

Observations: TypeAlias = Mapping[str, Sequence[Message]]
"""New messages for each agent that acts next."""

COMPONENT_TOLERANCE = 1e-6


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


@dataclass(frozen=True)
class Step:
    """The environment's answer to the agents' decisions.

    Args:
        observations: new messages for each agent that acts next; empty when ``done``.
        rewards: of each agent for its latest decision; 0 for agents that are left out.
        components: named parts of each agent's reward; they sum to it. Left out: one part named ``reward``.
        done: the episode is over.
        stop_reason: why, when ``done``; a short word such as ``answered`` or ``max_turns``.
        truncated: a limit ended the episode; values bootstrap from its last state.
        success: whether the task was solved, when ``done`` and the environment can say.
        metrics: named numbers for the log, for example ``{"parsed": 1.0}``. For a proportion give a numerator ``NAME``
            and a denominator ``NAME_of``: evaluations pool both over episodes.
    """

    observations: Observations = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    components: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    done: bool = False
    stop_reason: str = ""
    truncated: bool = False
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class UnnamedEnvironmentError(ConfigurationError, AttributeError):
    """An environment class has no ``name``; ``hasattr`` and introspection see a missing attribute."""


class _NoName:
    """Stands for ``name`` until a subclass sets it."""

    def __get__(self, instance: Environment | None, owner: type[Environment]) -> str:
        raise UnnamedEnvironmentError(
            f'environment class {owner.__name__} has no name; write `name = "{_snake_case(owner.__name__)}"` in its '
            f"body{place_of(owner)}"
        )


class Environment(ABC):
    """Base class of all environments. Methods may be ``async``.

    The base class keeps the order of calls: it checks the arguments of ``step`` and the results of ``reset``, ``step``
    and ``tasks`` around the methods of every subclass (see :class:`TurnOrder`). A subclass that hands the calls on to
    another environment says so with ``class Mine(Environment, proxy=True)``; it and its subclasses are not checked.

    Class attributes:
        name: short name, used in task keys, metrics and on the command line.
        agents: the agents that take part, in a fixed order.
        quick: ``step`` takes well under a millisecond whatever the agents say, and waits for nothing. A server then
            calls it without a thread, which takes half the time, and without a deadline.
        forks: :meth:`copy` in the middle of an episode gives an instance that continues from there. With processes or
            connections it does not; a turn tree then replays the earlier turns.
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
        if cls._proxy:
            return
        for name, check, note in (
            ("reset", _begin, _began),
            ("step", _check_actions, _stepped),
            ("tasks", lambda environment, split: None, _check_tasks),  # sources check the split,
        ):
            method = cls.__dict__.get(name)
            if inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False):
                setattr(cls, name, _checked(method, check, note))
        if inspect.isfunction(cls.__dict__.get("copy")):
            cls.copy = _with_order(cls.__dict__["copy"])  # type: ignore[method-assign]

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

        None where nothing tells tasks apart, such as a game that always begins with the same board: the splits may then
        pose the same. By default what :class:`SeededTasks` was given, else empty: ``check-env`` then compares what
        :meth:`reset` shows.
        """
        source = self.tasks(task.split)
        return source.identity(task.data) if isinstance(source, SeededTasks) else ""

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Replies, turn after turn for each agent, that earn the highest reward, or None if none are known."""
        return None

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the returns of worthless and of the best replies, each the sum over all agents, or None if unknown."""
        return None

    def majority(self, task: Task, replies: Sequence[str]) -> bool | None:
        """Return whether the most frequent answer of the replies is right; None if the task has no vote."""
        return None

    def close(self) -> None:
        """Free the environment's resources; may be called twice."""

    def copy(self) -> Environment:
        """Return an independent instance with the same settings, for an episode that runs at the same time.

        Raises:
            EnvironmentContractError: the instance holds something that cannot be copied.
        """
        try:
            return _carried(self, copy.deepcopy(self))
        except Exception as error:  # attributes may raise anything
            held = self._uncopied()
            raise EnvironmentContractError(
                f"environment {self.name!r} cannot be copied: {held}{type(error).__name__}: {error}; make all but "
                f"plain settings in reset{', set `forks = False`' if self.forks else ''} or write a copy method"
                f"{place_of(type(self))}"
            ) from error

    def _uncopied(self) -> str:
        """Return the first attribute that cannot be copied, for a message."""
        for name, value in vars(self).items():
            try:
                copy.deepcopy(value)
            except Exception:  # as above
                return f"its attribute {name!r}: "
        return ""


class TurnOrder:
    """Check that an environment and its caller keep the contract, for one episode at a time.

    :class:`Environment` has one for every episode: it calls :meth:`began` after ``reset``, :meth:`check_actions` before
    ``step`` and :meth:`stepped` after it.

    Args:
        environment: the environment's name, for messages.
        agents: its agents.
    """

    def __init__(self, environment: str, agents: Sequence[str]) -> None:
        self.environment, self.agents = environment, tuple(agents)
        self._due: frozenset[str] | None = None
        self._acted: set[str] = set()
        self._done = False

    @property
    def due(self) -> tuple[str, ...]:
        """The agents that act next, in the environment's order; empty before ``reset`` and after the end."""
        return tuple(agent for agent in self.agents if self._due is not None and agent in self._due)

    def began(self, observations: Observations) -> None:
        """Record the observations of ``reset``.

        Raises:
            EnvironmentContractError: they are empty, no messages, or name an agent that does not exist.
        """
        self._done, self._acted = False, set()
        self._due = self._receivers(observations)
        if not self._due:
            raise self._error("reset returned no observation", "give at least one agent its first messages")

    def check_actions(self, actions: Mapping[str, Message]) -> None:
        """Validate the actions of a step.

        Raises:
            EnvironmentContractError: ``reset`` was not called, the episode is over, or the agents are not those due.
        """
        if self._done:
            raise self._error("step was called after the episode was done", "call reset with a new task first")
        if self._due is None:
            raise self._error("step was called before reset", "call reset with a task first")
        if set(actions) != self._due:
            raise self._error(
                f"step received actions of {sorted(actions)}, but due are {list(self.due)}",
                "pass exactly one message for each agent that received an observation",
            )

    def stepped(self, step: Step) -> None:
        """Record the result of ``step``.

        Raises:
            EnvironmentContractError: unknown agents, components that do not sum to the reward, an observation after
                the end, or no agent that acts before it.
            NonFiniteError: a reward is NaN or infinite.
        """
        if not isinstance(step, Step):
            raise self._error(f"step returned {_shown(step)}", "return a Step")
        self._acted = self._acted.union(self._due or ())  # a new set: an episode that forks has a copy of this order
        for agent in (*step.rewards, *step.components):
            if agent not in self.agents:
                raise self._error(f"a reward names the agent {agent!r}", f"its agents are {list(self.agents)}")
        for agent, reward in step.rewards.items():
            if not isinstance(reward, SupportsFloat):
                raise self._error(f"the reward of agent {agent!r} is {_shown(reward)}", "give a number")
            if not math.isfinite(reward):
                raise NonFiniteError(
                    f"environment {self.environment!r}: the reward of agent {agent!r} is {reward!r}; "
                    "rewards must be finite; correct the environment"
                )
            if reward != 0 and agent not in self._acted:
                raise self._error(
                    f"agent {agent!r} has reward {reward!r} before its first decision", "reward it after it has acted"
                )
        for agent, parts in step.components.items():
            if not isinstance(parts, Mapping) or not all(isinstance(part, SupportsFloat) for part in parts.values()):
                raise self._error(f"the components of agent {agent!r} are {_shown(parts)}", "give numbers by name")
            total, reward = math.fsum(parts.values()), step.rewards.get(agent, 0.0)
            if not abs(total - reward) <= COMPONENT_TOLERANCE * max(1.0, abs(reward)):
                raise self._error(
                    f"the reward of agent {agent!r} is {reward!r} but its components {dict(parts)} sum to {total!r}",
                    "make every part of a reward a component",
                )
        receivers = self._receivers(step.observations)
        if step.done and receivers:
            raise self._error(f"the episode is done but {sorted(receivers)} received observations", "send none")
        if not step.done and not receivers:
            raise self._error("the episode is not done but no agent received an observation", "end it or give one")
        if step.done and not step.stop_reason:
            raise self._error("the episode is done without a stop_reason", "name why it ended")
        self._due, self._done = receivers, step.done

    def _receivers(self, observations: Observations) -> frozenset[str]:
        remedy = f'return new messages by agent, as in {{{self.agents[0]!r}: [Message("user", "...")]}}'
        if not isinstance(observations, Mapping):
            raise self._error(f"the observations are {_shown(observations)}", remedy)
        for agent, messages in observations.items():
            if agent not in self.agents:
                raise self._error(f"an observation is for agent {agent!r}", f"its agents are {list(self.agents)}")
            if isinstance(messages, str) or not isinstance(messages, Sequence):
                raise self._error(f"the observation of agent {agent!r} is {_shown(messages)}", remedy)
            strange = [message for message in messages if not isinstance(message, Message)]
            if strange:
                raise self._error(f"the observation of agent {agent!r} holds {_shown(strange[0])}", remedy)
        return frozenset(observations)

    def _error(self, fault: str, remedy: str) -> EnvironmentContractError:
        return EnvironmentContractError(f"environment {self.environment!r}: {fault}; {remedy}")


def _checked(
    method: Callable[..., Any],
    check: Callable[[Environment, Any], None],
    note: Callable[[Environment, Any], None],
) -> Callable[..., Any]:
    """Return the method with a check of its argument and one of its result, whose errors name the method's place.

    A method that a subclass calls through ``super()`` is not checked: the subclass's own is.
    """

    @contextmanager
    def watched(environment: Environment, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[list[Any]]:
        result: list[Any] = []
        if environment.__dict__.get("_inside"):
            yield result
            return
        check(environment, next(iter((*arguments, *named.values())), None))
        environment.__dict__["_inside"] = True
        try:
            yield result
        finally:
            environment.__dict__["_inside"] = False
        try:
            note(environment, result[0])
        except (EnvironmentContractError, ConfigurationError, NonFiniteError) as error:
            raise type(error)(f"{error} ({place(method)})") from None

    @functools.wraps(method)
    def called(self: Environment, *arguments: Any, **named: Any) -> Any:
        with watched(self, arguments, named) as result:
            result.append(method(self, *arguments, **named))
        return result[0]

    @functools.wraps(method)
    async def awaited(self: Environment, *arguments: Any, **named: Any) -> Any:
        with watched(self, arguments, named) as result:
            result.append(await method(self, *arguments, **named))
        return result[0]

    return awaited if inspect.iscoroutinefunction(method) else called


def _with_order(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass's ``copy`` whose result keeps the position in the order of calls."""

    @functools.wraps(method)
    def copied(self: Environment) -> Environment:
        return _carried(self, method(self))

    return copied


def _carried(environment: Environment, made: Environment) -> Environment:
    """Return a copy that keeps the position in the order of calls."""
    made.__dict__["_inside"] = False
    if environment.forks:
        made.__dict__["_order"] = copy.copy(environment.__dict__.get("_order"))
    return made


def _begin(environment: Environment, task: Any) -> None:
    environment.__dict__["_order"] = None


def _began(environment: Environment, observations: Any) -> None:
    order = TurnOrder(environment.name, environment.agents)
    order.began(observations)
    environment.__dict__["_order"] = order


def _check_actions(environment: Environment, actions: Any) -> None:
    order = environment.__dict__.get("_order") or TurnOrder(environment.name, environment.agents)
    order.check_actions(actions)


def _stepped(environment: Environment, step: Any) -> None:
    environment.__dict__["_order"].stepped(step)


def _check_tasks(environment: Environment, source: Any) -> None:
    if not (hasattr(source, "__getitem__") and hasattr(source, "size")):
        raise ConfigurationError(
            f"environment {environment.name!r}: tasks returned {_shown(source)}; return a TaskSource, as in "
            "`DatasetTasks(self.name, split, rows)`"
        )
    posed = getattr(source, "environment", environment.name)
    if posed != environment.name:
        raise ConfigurationError(
            f"environment {environment.name!r}: its tasks are made for {posed!r}; give {type(source).__name__} "
            "`self.name`"
        )


def _snake_case(name: str) -> str:
    """Return a class's name as a short name.

    >>> _snake_case("MyGameEnvironment")
    'my_game'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Environment") or name).lower()


def _shown(value: Any) -> str:
    """Return a value in a message, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


@dataclass(frozen=True)
class Outcome:
    """A single-agent environment's answer to one reply.

    Args:
        components: named parts of the reward; the reward is their sum.
        observation: the next user message, or several messages; None ends the episode.
        stop_reason: why it ended, when it did.
        truncated: a limit ended it.
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

    def __new__(cls, *args: Any, **kwargs: Any) -> SingleAgentEnvironment:
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
                f"environment {self.name!r}: reply returned {_shown(outcome)}; return an Outcome, as in "
                f'`Outcome({{"right": 1.0}})` ({place(self.reply)})'
            )
        parts = outcome.components
        if not isinstance(parts, Mapping) or not all(isinstance(part, SupportsFloat) for part in parts.values()):
            raise EnvironmentContractError(
                f"environment {self.name!r}: the components of the Outcome are {_shown(parts)}; give numbers by name, "
                f'as in `Outcome({{"right": 1.0}})` ({place(self.reply)})'
            )
        done = outcome.observation is None
        return Step(
            observations={} if done else {agent: self._as_messages(outcome.observation, self.reply)},
            rewards={agent: math.fsum(parts.values())},
            components={agent: dict(parts)},
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
            f"environment {self.name!r}: {method.__name__} returned the observation {_shown(observation)}; return "
            f"text, a Message or a list of them ({place(method)})"
        )
