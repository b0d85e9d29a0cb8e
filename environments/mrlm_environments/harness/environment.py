"""A user's program with one agent or several, played as an environment through an endpoint for its calls."""

from __future__ import annotations

import asyncio
import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrlm_environments.question.environment import QuestionEnvironment, Reward
from mrlm_pl.concurrency.event_loop import END_SECONDS
from mrlm_pl.environment import Message, Observations, Step, Task
from mrlm_pl.environment.prompts import Prompt
from mrlm_pl.errors import ConfigurationError, ProgramError
from mrlm_pl.grouping import summed
from mrlm_pl.serving.gateway.programs import run_command, run_function
from mrlm_pl.serving.gateway.session import COUNTS, Limits, Session
from mrlm_pl.settings import PositiveFloat, PositiveInt, is_loopback


class HarnessEnvironment(QuestionEnvironment):
    """Runs a program for each row of a data set; its calls of OpenAI's or Anthropic's API are its agents' turns.

    The program finds the endpoint and its key in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, which OpenAI's client
    reads, and in ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``, which Anthropic's does. The name of the model
    chooses the agent of a call, or the key does: ``KEY.AGENT``. Each call is a turn sampled by the run's engine with
    the run's sampling. Several agents may call concurrently; calls of one agent are answered one after another.

    The episode ends with the program. Its rewards are those of ``rewards``, called with the program's output and the
    row; those posted to ``$MRLM_EPISODE_URL/reward`` as JSON by agent, at any time, for each agent's latest turn; and
    without ``rewards`` the value of a ``function``. Agents that made no call are left out. A program that fails,
    hangs, ends without a reward, or reaches a limit of the run is a failed episode, never a reward of 0.

    Args:
        data: rows; see :class:`QuestionEnvironment`.
        command: program and its arguments, with fields of the row in braces; the row is also on its standard input.
        function: function, plain or ``async``, that replaces the command, of the row and an
            :class:`~mrlm_pl.serving.gateway.programs.Endpoint`. Without both, programs that were started elsewhere post
            to ``/episodes``.
        rewards: functions of the output and the row; see :class:`QuestionEnvironment`.
        agents: agents that may call.
        max_calls: maximum number of calls of an episode; others are rejected.
        max_tokens: sampled tokens of an episode after which calls are rejected; None has no bound.
        lease_seconds: longest time between two calls, or until the end, before the episode fails.
        ignore: parameters of calls, such as ``temperature``, that are accepted without an effect; other parameters that
            the run's sampling decides are rejected.
        gold: reply of every agent with which the program earns the most; see :class:`QuestionEnvironment`.
        success_at: mean over the agents, posted rewards included, from which an episode is a success.
        host: address of the endpoint.
        port: port of the endpoint; 0 takes a free one.

    Raises:
        ConfigurationError: a command and a function are given, or a number is out of range; see
            :class:`QuestionEnvironment`.
    """

    name = "harness"
    forks = False
    whole_prompts = True
    needs_reward = False

    def __init__(
        self,
        data: dict[str, Any] | list[dict[str, Any]] | str | os.PathLike[str],  # first: a path takes a mapping as text
        command: list[str] | None = None,
        function: Callable[..., Any] | None = None,
        rewards: list[Reward | Callable[..., Any]] | None = None,
        agents: Sequence[str] = ("agent",),
        max_calls: PositiveInt = 64,
        max_tokens: PositiveInt | None = None,
        lease_seconds: PositiveFloat = 50.0,
        ignore: Sequence[str] = (),
        gold: str = "",
        success_at: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._returns = function is not None and rewards is None
        if self._returns:
            rewards = [Reward(_returned, name="reward")]  # no lambda: host processes get a pickle
        super().__init__(data, rewards or [], prompt="", agents=agents, gold=gold, success_at=success_at)
        if isinstance(command, str) or isinstance(ignore, str) or (command is not None and function is not None):
            raise ConfigurationError(
                f"harness: command is {command!r}, function is {function!r}, ignore is {ignore!r}; give a list of "
                "words as the command or a function, not both, and a list to ignore"
            )
        # Not at the head: gRPC and aiohttp take a quarter of a second, even if other environments are used.
        from mrlm_pl.serving.gateway.server import Gateway
        from mrlm_pl.serving.transport.security import read_token

        elsewhere = command is None and function is None
        if elsewhere and not is_loopback(host) and read_token(None) is None:
            raise ConfigurationError(
                f"harness: host {host!r} can be reached from other machines, where anyone could open episodes; set "
                "MRLM_TOKEN, which programs then send as the key of `POST /episodes`"
            )
        self.command, self.function = command, function
        self.limits, self.ignore = Limits(max_calls, max_tokens, lease_seconds), tuple(ignore)
        self.gateway = Gateway(host, port, programs=not elsewhere)
        self._session: Session | None = None

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        """Start the program and wait for its first calls; see :meth:`Environment.reset`.

        Raises:
            ProgramError: it cannot be started, fails, hangs, or ends without a call.
        """
        left, self._session = self._session, None
        if left is not None:  # the episode before was not played to its end
            await self.gateway.run(self.gateway.remove, left)
        self._row = task.data
        session = self._session = self.gateway.add(Session(self.agents, self.limits, task.data, self.ignore))
        await self.gateway.run(self._start, session)
        if prompts := await self.gateway.run(session.next):
            return prompts
        if session.refusal:
            raise ProgramError(f"all calls of the program were refused, the last one since {session.refusal}")
        raise ProgramError(
            "the program ended without a call; point its client at OPENAI_BASE_URL, and turn off caches of replies"
        )

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        """Answer the calls that wait and wait for the next ones; see :meth:`Environment.step`.

        Raises:
            ProgramError: the program fails, hangs, or ends without a reward.
        """
        session = self._session
        assert session is not None, "the base class keeps the order of calls"
        prompts, posted = await self.gateway.run(self._after, session, actions)
        if prompts:
            return Step(prompts, components=posted)
        self._session = None
        return await self._score(session, posted)

    def close(self) -> None:
        """Stop the program, and the endpoint with the last one; see :meth:`Environment.close`."""
        session, self._session = self._session, None
        if session is not None:
            self.gateway.submit(self.gateway.remove(session)).result(2 * END_SECONDS)
        self.gateway.rest()

    def _task_data(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as JSON, after a check that it has the fields of the command."""
        plain = super()._task_data(row)
        for word in self.command or ():
            word.format_map(plain)
        return plain

    async def _start(self, session: Session) -> None:
        """Start the program of an episode; on the gateway's event loop."""
        endpoint = self.gateway.endpoint(session)
        if self.command is not None:
            session.program = asyncio.ensure_future(run_command(self.command, session.row, endpoint))
        elif self.function is not None:
            session.program = asyncio.ensure_future(run_function(self.function, session.row, endpoint))
        else:
            session.program = asyncio.get_running_loop().create_future()
            await self.gateway.give(session)

    async def _after(
        self, session: Session, actions: Mapping[str, Message]
    ) -> tuple[dict[str, Prompt], dict[str, dict[str, float]]]:
        """Return the next prompts and the rewards posted until then; on the gateway's event loop."""
        session.answer(actions)
        prompts = await session.next()
        if not prompts:
            await self.gateway.remove(session)  # accepts no further rewards
        rewards, session.rewards = session.rewards, {}
        return prompts, rewards

    async def _score(self, session: Session, posted: Mapping[str, Mapping[str, float]]) -> Step:
        """Return the last step, from the reward functions and the rewards posted since the step before."""
        output = session.program.result()
        if self.rewards and not (self._returns and output is None):
            step = self._judge(await self.awaited(lambda: (output, copy.deepcopy(dict(self._row)))))
        elif session.rewarded:
            step = Step(done=True, stop_reason="ended")
        else:
            raise ProgramError(
                "the program ended without a reward; post it to $MRLM_EPISODE_URL/reward, return it from the "
                "function, or give the environment `rewards`"
            )
        acted = [agent for agent in self.agents if agent in session.acted]
        mean = math.fsum([*step.rewards.values(), *session.posted.values()]) / len(self.agents)
        parts = {agent: [by_agent.get(agent, {}) for by_agent in (step.components, posted)] for agent in acted}
        components = {agent: summed(item for part in own for item in part.items()) for agent, own in parts.items()}
        return Step(
            components=components,
            done=True,
            stop_reason="ended",
            success=None if self.success_at is None else mean >= self.success_at,
            metrics={**step.metrics, **{name: float(session.counts[name]) for name in COUNTS}},
        )


def _returned(output: Any, row: Mapping[str, Any]) -> Any:
    return output
