"""Plays of an environment with written replies, for its checks."""

from __future__ import annotations

import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from mrlm_pl.concurrency.calls import DeadlineError
from mrlm_pl.concurrency.event_loop import EventLoopThread, result_of
from mrlm_pl.environment.contract import Environment
from mrlm_pl.environment.steps import Observations, Step, TurnOrder
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import EnvironmentContractError
from mrlm_pl.grouping import summed

SPAM = "I do not know."

CALL_SECONDS = 300.0
"""Deadline of a call of an environment in the main thread."""

Replies: TypeAlias = str | Mapping[str, Sequence[str]] | Callable[[Sequence[Message]], str]
"""One text for all turns, texts by agent in turn (the last one repeats), or a function of the latest observation."""


@dataclass(frozen=True)
class Play:
    """Observations and steps of an episode, in order."""

    observed: tuple[Observations, ...]
    steps: tuple[Step, ...]

    @property
    def reward(self) -> float:
        """The sum of all agents' rewards."""
        return sum(self.returns.values())

    @property
    def returns(self) -> dict[str, float]:
        """The sum of each agent's rewards."""
        return summed(pair for step in self.steps for pair in step.rewards.items())

    @property
    def shown(self) -> str:
        """All observations as text."""
        by_agent = (messages for observations in self.observed for messages in observations.values())
        return "\n".join(message.content for messages in by_agent for message in messages)

    def as_json(self) -> str:
        """Return observations and steps as text."""
        return json.dumps([list(map(as_plain, self.observed)), list(map(asdict, self.steps))])


def play(
    environment: Environment,
    task: Task,
    replies: Replies,
    *,
    max_turns: int,
    must_end: bool = True,
) -> Play:
    """Play one episode on an environment, which stays open.

    Args:
        environment: environment to play; it is used, not copied.
        task: task of the episode.
        replies: replies of the agents.
        max_turns: limit of the episode's length.
        must_end: whether a longer episode is an error; else it is truncated.

    Raises:
        EnvironmentContractError: the environment breaks the contract, or the episode does not end.
    """
    order = TurnOrder(environment.name, environment.agents)
    observations: Observations = call_with_deadline(environment.reset, task)
    order.record_reset(observations)
    observed, steps = [observations], list[Step]()
    replies_used = dict.fromkeys(environment.agents, 0)
    while not (steps and steps[-1].done):
        if len(steps) == max_turns:
            if not must_end:
                break
            raise EnvironmentContractError(f"the episode of {task.key} did not end within {max_turns} turns")
        actions = {}
        for agent in order.due:
            if isinstance(replies, str):
                text = replies
            elif callable(replies):
                text = replies(observed[-1][agent])
            else:
                text = replies[agent][min(replies_used[agent], len(replies[agent]) - 1)]
            actions[agent] = Message("assistant", text)
            replies_used[agent] += 1
        step: Step = call_with_deadline(environment.step, actions)
        order.record_step(step)
        steps.append(step)
        if not step.done:
            observed.append(step.observations)
    return Play(tuple(observed), tuple(steps))


def play_copy(environment: Environment, task: Task, replies: Replies, *, max_turns: int, must_end: bool = True) -> Play:
    """Play one episode on a new copy of an environment; see :func:`play`."""
    with new_copy(environment) as copied:
        return play(copied, task, replies, max_turns=max_turns, must_end=must_end)


@contextmanager
def new_copy(environment: Environment) -> Iterator[Environment]:
    """Yield a new copy of an environment, and close it."""
    copied = environment.copy()
    try:
        yield copied
    finally:
        close(copied)


def first_observations(environment: Environment, task: Task) -> Observations:
    """Return the first observations of a task on a new copy of an environment."""
    return play_copy(environment, task, "", max_turns=0, must_end=False).observed[0]


class _DeadlinePassed(BaseException):
    """A call is late; unlike an ``Exception``, no environment takes it for its own error."""


def call_with_deadline(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a method that may be ``async``, even if a loop runs in this thread, as in a notebook.

    Raises:
        DeadlineError: the method does not return within :data:`CALL_SECONDS`, in the main thread, where nothing else
            uses the alarm signal.
    """

    def stop(*_: object) -> None:
        raise _DeadlinePassed

    in_main_thread = threading.current_thread() is threading.main_thread()  # no other has handlers of signals
    alarm_set = in_main_thread and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    if alarm_set:
        signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, CALL_SECONDS)
    try:
        value = method(*arguments)
        if not inspect.iscoroutine(value):
            return value
        with closing(EventLoopThread()) as loop:
            return result_of(loop.submit(value))
    except _DeadlinePassed as late:
        fault = f"{method.__qualname__} did not return within {CALL_SECONDS:g} s"
        raise DeadlineError(fault).with_traceback(late.__traceback__) from None
    finally:
        if alarm_set:
            signal.setitimer(signal.ITIMER_REAL, *timer)
        if alarm_set and signal.getsignal(signal.SIGALRM) is stop:  # else the environment has set its own
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def close(environment: Environment) -> None:
    """Close an environment, whose ``close`` may be ``async``."""
    call_with_deadline(environment.close)


def as_plain(observations: Observations) -> dict[str, Any]:
    """Return observations as JSON-like data."""
    return {agent: [asdict(message) for message in messages] for agent, messages in observations.items()}
