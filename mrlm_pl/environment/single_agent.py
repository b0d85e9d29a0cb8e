"""Environments with one agent, written with plain values."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from mrlm_pl.environment.contract import Environment
from mrlm_pl.environment.steps import Observations, Step, shown
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, place


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
                f"environment {self.name!r}: reply returned {shown(outcome)}; return an Outcome, as in "
                f'`Outcome({{"right": 1.0}})` ({place(self.reply)})'
            )
        parts = outcome.components
        if not isinstance(parts, Mapping) or not all(isinstance(part, SupportsFloat) for part in parts.values()):
            raise EnvironmentContractError(
                f"environment {self.name!r}: the components of the Outcome are {shown(parts)}; give numbers by name, "
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
            f"environment {self.name!r}: {method.__name__} returned the observation {shown(observation)}; return "
            f"text, a Message or a list of them ({place(method)})"
        )
