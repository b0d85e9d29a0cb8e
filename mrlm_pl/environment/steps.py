"""A step of an environment, and the order of calls in which an episode makes them."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, SupportsFloat, TypeAlias

from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, NonFiniteError, source_line

Observations: TypeAlias = Mapping[str, Sequence[Message]]
"""New messages for each agent that acts next."""

COMPONENT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Step:
    """The environment's answer to the agents' decisions.

    Args:
        observations: new messages for each agent that acts next; empty when ``done``.
        rewards: reward of each agent for its latest decision; 0 for agents that are not named. By default the sums of
            the components.
        components: named parts of each agent's reward; they sum to it. By default one part named ``reward``.
        done: whether the episode is over.
        stop_reason: reason of the end, when ``done``; a short word such as ``answered`` or ``max_turns``.
        truncated: whether a limit ended the episode; values bootstrap from its last state.
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

    def __post_init__(self) -> None:
        if self.components and not self.rewards:
            numbers = {agent: components for agent, components in self.components.items() if are_numbers(components)}
            object.__setattr__(
                self, "rewards", {agent: math.fsum(components.values()) for agent, components in numbers.items()}
            )
        for name in ("success", "truncated", "done"):
            value = getattr(self, name)
            if value is not None and is_number(value) and value in (0, 1):
                object.__setattr__(self, name, bool(value))  # records and other processes take no other type


def are_numbers(components: Any) -> bool:
    """Return whether the parts of a reward are numbers by name."""
    return isinstance(components, Mapping) and all(map(is_number, components.values()))


def is_number(value: Any) -> bool:
    """Return whether a value is a number, of Python or another library."""
    return isinstance(value, (float, int, SupportsFloat))  # the protocol last: its check takes 20 microseconds


class TurnOrder:
    """Check that an environment and its caller keep the contract, for one episode at a time.

    :class:`Environment` has one for every episode: it calls :meth:`record_reset` after ``reset``, :meth:`check_actions`
    before ``step`` and :meth:`record_step` after it.

    Args:
        environment: the environment's name, for messages.
        agents: agents of the environment.
    """

    def __init__(self, environment: str, agents: Sequence[str]) -> None:
        self.environment, self.agents = environment, tuple(agents)
        self._due: frozenset[str] | None = None  # empty when the episode is done
        self._acted: set[str] = set()

    @property
    def due(self) -> tuple[str, ...]:
        """The agents that act next, in the environment's order; empty before ``reset`` and after the end."""
        return tuple(agent for agent in self.agents if agent in (self._due or ()))

    def record_reset(self, observations: Observations) -> None:
        """Record the observations of ``reset``.

        Raises:
            EnvironmentContractError: they are empty, are not messages, or name an agent that does not exist.
        """
        self._acted = set()
        self._due = self._receivers(observations)
        if not self._due:
            raise self._error("reset returned no observation", "give at least one agent its first messages")

    def check_actions(self, actions: Mapping[str, Message]) -> None:
        """Validate the actions of a step.

        Raises:
            EnvironmentContractError: ``reset`` was not called, the episode is over, or the agents are not those due.
        """
        if self._due is None:
            raise self._error("step was called before reset", "call reset with a task first")
        if not self._due:
            raise self._error("step was called after the episode was done", "call reset with a new task first")
        if set(actions) != self._due:
            raise self._error(
                f"step received actions of {sorted(actions)}, but due are {list(self.due)}",
                "pass exactly one message for each agent that received an observation",
            )

    def record_step(self, step: Step) -> None:
        """Record the result of ``step``.

        Raises:
            EnvironmentContractError: unknown agents, components that do not sum to the reward, a metric that is not a
                finite number, a success that is not a boolean, an observation after the end, or no agent that
                acts before it.
            NonFiniteError: a reward is NaN or infinite.
        """
        if not isinstance(step, Step):
            raise self._error(f"step returned {describe(step)}", "return a Step")
        if not isinstance(step.rewards, Mapping):
            remedy = f"give them by agent, as in {{{self.agents[0]!r}: 1.0}}"
            raise self._error(f"the rewards are {describe(step.rewards)}", remedy)
        self._acted = self._acted.union(self._due or ())  # a new set: an episode that forks has a copy of this order
        for agent in (*step.rewards, *step.components):
            if agent not in self.agents:
                raise self._error(f"a reward names the agent {agent!r}", f"its agents are {list(self.agents)}")
        for agent, reward in step.rewards.items():
            if not is_number(reward):
                raise self._error(f"the reward of agent {agent!r} is {describe(reward)}", "give a number")
            if not math.isfinite(reward):
                raise NonFiniteError(
                    f"environment {self.environment!r}: the reward of agent {agent!r} is {reward!r}; "
                    "rewards must be finite; correct the environment"
                )
            if reward != 0 and agent not in self._acted:
                raise self._error(
                    f"agent {agent!r} has reward {reward!r} before its first decision", "reward only agents that acted"
                )
        for agent, components in step.components.items():
            if not are_numbers(components):
                raise self._error(
                    f"the components of agent {agent!r} are {describe(components)}", "give numbers by name"
                )
            total, reward = math.fsum(components.values()), step.rewards.get(agent, 0.0)
            if not abs(total - reward) <= COMPONENT_TOLERANCE * max(1.0, abs(reward)):
                raise self._error(
                    f"the reward of agent {agent!r} is {reward!r} but its components {dict(components)} "
                    f"sum to {total!r}",
                    "make every part of a reward a component",
                )
        for name, metric in step.metrics.items():
            if not (is_number(metric) and math.isfinite(metric)):
                raise self._error(f"the metric {name!r} is {describe(metric)}", "give a finite number")
        if step.success not in (None, False, True):
            raise self._error(f"success is {describe(step.success)}", "give True, False or None")
        if not isinstance(step.truncated, bool):
            raise self._error(f"truncated is {describe(step.truncated)}", "give True or False")
        receivers = self._receivers(step.observations)
        if step.done and receivers:
            raise self._error(f"the episode is done but {sorted(receivers)} received observations", "send none")
        if not step.done and not receivers:
            raise self._error("the episode is not done but no agent received an observation", "end it or give one")
        if step.done and not step.stop_reason:
            raise self._error("the episode is done without a stop_reason", "name why it ended")
        if step.done and not isinstance(step.stop_reason, str):
            raise self._error(f"the stop_reason is {describe(step.stop_reason)}", "name why it ended in a word")
        self._due = receivers

    def _receivers(self, observations: Observations) -> frozenset[str]:
        remedy = f'return new messages by agent, as in {{{self.agents[0]!r}: [Message("user", "...")]}}'
        if not isinstance(observations, Mapping):
            raise self._error(f"the observations are {describe(observations)}", remedy)
        for agent, messages in observations.items():
            if agent not in self.agents:
                raise self._error(f"an observation is for agent {agent!r}", f"its agents are {list(self.agents)}")
            if isinstance(messages, str) or not isinstance(messages, Sequence):
                raise self._error(f"the observation of agent {agent!r} is {describe(messages)}", remedy)
            strange = [item for item in messages if not (isinstance(item, Message) and isinstance(item.content, str))]
            if strange:
                raise self._error(f"the observation of agent {agent!r} holds {describe(strange[0])}", remedy)
            if not messages and agent not in self._acted:
                raise self._error(f"agent {agent!r} has no message before its first decision", remedy)
        return frozenset(observations)

    def _error(self, fault: str, remedy: str) -> EnvironmentContractError:
        return EnvironmentContractError(f"environment {self.environment!r}: {fault}; {remedy}")


def with_checks(
    method: Callable[..., Any],
    check_result: Callable[[Any, Any], None],
    check_argument: Callable[[Any, Any], None] | None = None,
) -> Callable[..., Any]:
    """Return an environment's method with a check of its argument and one of its result.

    Errors of the result name the method's source line. A method that a subclass calls through ``super()`` is not
    checked: the subclass's own is.

    Args:
        method: method of an environment's class.
        check_result: receives the environment and the result.
        check_argument: receives the environment and the argument; None checks nothing.
    """

    @contextmanager
    def calling(environment: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[None]:
        if check_argument is not None:
            check_argument(environment, next(iter((*arguments, *named.values())), None))
        environment.__dict__["_inside"] = True
        try:
            yield
        finally:
            environment.__dict__["_inside"] = False

    def check_returned(environment: Any, result: Any) -> Any:
        try:
            check_result(environment, result)
        except (EnvironmentContractError, ConfigurationError, NonFiniteError) as error:
            raise type(error)(f"{error} ({source_line(method)})") from None
        return result

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.__dict__.get("_inside"):
            return method(self, *arguments, **named)
        with calling(self, arguments, named):
            result = method(self, *arguments, **named)
        return check_returned(self, result)

    @functools.wraps(method)
    async def call_async(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.__dict__.get("_inside"):
            return await method(self, *arguments, **named)
        with calling(self, arguments, named):
            result = await method(self, *arguments, **named)
        return check_returned(self, result)

    return call_async if inspect.iscoroutinefunction(method) else call


def with_call_order(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an environment's ``copy`` whose result keeps the position in the order of calls."""

    @functools.wraps(method)
    def copied(self: Any) -> Any:
        copied_environment = method(self)
        copied_environment.__dict__["_inside"] = False
        if self.forks:
            copied_environment.__dict__["_order"] = copy.copy(self.__dict__.get("_order"))
        return copied_environment

    return copied


def _forget_order(environment: Any, task: Any) -> None:
    environment.__dict__["_order"] = None
    if not isinstance(getattr(task, "data", {}), Mapping):  # a record of it could not be read again
        fault = f"environment {environment.name!r}: the data of task {task.key} is {describe(task.data)}"
        raise EnvironmentContractError(f"{fault}; give a mapping, as in {{'question': ...}}")


def _start_order(environment: Any, observations: Any) -> None:
    order = TurnOrder(environment.name, environment.agents)
    order.record_reset(observations)
    environment.__dict__["_order"] = order


def _check_actions(environment: Any, actions: Any) -> None:
    order = environment.__dict__.get("_order") or TurnOrder(environment.name, environment.agents)
    order.check_actions(actions)


def _record_step(environment: Any, step: Any) -> None:
    environment.__dict__["_order"].record_step(step)


def _check_tasks(environment: Any, source: Any) -> None:
    agents = list(environment.agents)
    if not agents or len({*agents}) < len(agents):
        remedy = "give each its own name, as in ('first', 'second')"
        raise ConfigurationError(f"environment {environment.name!r}: its agents are {agents}; {remedy}")
    if not (hasattr(source, "__getitem__") and hasattr(source, "size")):
        raise ConfigurationError(
            f"environment {environment.name!r}: tasks returned {describe(source)}; return a TaskSource, as in "
            "`DatasetTasks(self.name, split, rows)`"
        )
    source_environment = getattr(source, "environment", environment.name)
    if source_environment != environment.name:
        raise ConfigurationError(
            f"environment {environment.name!r}: its tasks are made for {source_environment!r}; give "
            f"{type(source).__name__} `self.name`"
        )


ORDER_OF_CALLS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "reset": functools.partial(with_checks, check_argument=_forget_order, check_result=_start_order),
    "step": functools.partial(with_checks, check_argument=_check_actions, check_result=_record_step),
    "tasks": functools.partial(with_checks, check_result=_check_tasks),  # sources check the split
    "copy": with_call_order,
}
"""Wrappers of an environment's methods by name, which check them and keep a :class:`TurnOrder` for each episode."""


def describe(value: Any) -> str:
    """Return a value in a message, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
