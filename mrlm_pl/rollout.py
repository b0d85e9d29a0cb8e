"""Play episodes: environments on one side, engines on the other, records as the result.

Local environments are played in lockstep waves: every episode that waits for a decision is sampled in one engine call,
then every environment is stepped off the event loop. A failure of an environment is not an outcome: the episode is
started again within a bound, and if it keeps failing it becomes a record with ``error`` set.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from mrlm_pl.engines.base import Engine, Sample, SampleRequest, Sampling
from mrlm_pl.environment import Environment, Observations, Step, TurnOrder
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, NonFiniteError, PolicyError
from mrlm_pl.event_loop import EventLoopThread
from mrlm_pl.hosting import STARTUP_SECONDS, EnvironmentHosts
from mrlm_pl.policy.chat import ChatFormat, Conversation
from mrlm_pl.seeding import derive_seed
from mrlm_pl.stepping import Call, EnvironmentCaller

logger = logging.getLogger(__name__)

# A NaN reward would poison the weights and a chat template that fails would fail for ever: these stop the run.
_FATAL = (NonFiniteError, PolicyError)


@dataclass(frozen=True)
class Seat:
    """Who decides for an agent, and how.

    Args:
        policy: name of the weights.
        chat: the policy's chat format.
        sampling: the distribution that turns are drawn from.
        context_window: tokens that fit into the policy's context.
    """

    policy: str
    chat: ChatFormat
    sampling: Sampling
    context_window: int


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to be played: its identity in the run and the seed of all its sampling."""

    id: str
    task: Task
    group: str
    seed: int
    iteration: int = -1


@dataclass
class _TurnDraft:
    agent: str
    index: int
    row: int
    start: int
    stop: int
    sample: Sample
    components: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0


class _Play:
    """One episode under way."""

    def __init__(self, spec: EpisodeSpec, environment: Environment, attempt: int) -> None:
        self.spec, self.environment, self.attempt = spec, environment, attempt
        self.order = TurnOrder(environment.name, environment.agents)
        self.conversations: dict[str, Conversation] = {}
        self.turns: list[_TurnDraft] = []
        self.steps = 0
        self.actions: dict[str, Message] = {}
        self.stop_reason, self.truncated = "", False
        self.success: bool | None = None
        self.metrics: dict[str, float] = {}
        self.error: str | None = None
        self.generate_seconds = self.environment_seconds = 0.0

    @property
    def over(self) -> bool:
        return bool(self.stop_reason) or self.error is not None

    def observe(self, observations: Observations, seats: Mapping[str, Seat]) -> None:
        for agent, messages in observations.items():
            if agent not in self.conversations:
                tools = [tool.to_chat() for tool in self.environment.tools(agent)]
                self.conversations[agent] = Conversation(seats[agent].chat, tools)
            self.conversations[agent].observe(messages)

    def record(self, agent: str, sample: Sample) -> None:
        conversation = self.conversations[agent]
        start = len(conversation.row.token_ids)
        self.actions[agent] = conversation.act(sample.token_ids, sample.logprobs)
        stop = len(conversation.row.token_ids)
        self.turns.append(_TurnDraft(agent, self.steps, len(conversation.rows) - 1, start, stop, sample))

    def take(self, step: Step, seats: Mapping[str, Seat]) -> None:
        """Book a step's rewards on each agent's latest turn and hand out its observations."""
        self.order.stepped(step)
        latest = {turn.agent: turn for turn in self.turns}
        for agent, reward in step.rewards.items():
            if agent in latest:
                parts = step.components.get(agent) or {"reward": reward}
                latest[agent].reward += reward
                for name, value in parts.items():
                    latest[agent].components[name] = latest[agent].components.get(name, 0.0) + value
        self.metrics.update(step.metrics)
        self.steps += 1
        self.actions = {}
        if step.done:
            self.stop_reason, self.truncated, self.success = step.stop_reason, step.truncated, step.success
        else:
            self.observe(step.observations, seats)

    def cut(self, reason: str) -> None:
        self.stop_reason, self.truncated = reason, True

    def episode(self, seats: Mapping[str, Seat]) -> Episode:
        trajectories: dict[str, tuple[Trajectory, ...]] = {}
        for agent in self.environment.agents:
            if agent in self.conversations and any(turn.agent == agent for turn in self.turns):
                trajectories[agent] = self._rows(agent, seats[agent])
        return Episode(
            id=self.spec.id,
            task=self.spec.task,
            group=self.spec.group,
            seed=self.spec.seed,
            iteration=self.spec.iteration,
            trajectories=trajectories,
            stop_reason=self.stop_reason if self.error is None else "error",
            truncated=self.truncated,
            success=self.success,
            metrics=dict(self.metrics),
            error=self.error,
            attempts=self.attempt,
            row_restarts=sum(conversation.restarts for conversation in self.conversations.values()),
            timings={"generate": self.generate_seconds, "environment": self.environment_seconds},
        )

    def _rows(self, agent: str, seat: Seat) -> tuple[Trajectory, ...]:
        rows = []
        for number, row in enumerate(self.conversations[agent].rows):
            turns = tuple(
                Turn(
                    agent=agent,
                    index=turn.index,
                    start=turn.start,
                    stop=turn.stop,
                    reward=turn.reward,
                    components=turn.components,
                    finish_reason=turn.sample.finish_reason,
                    policy=seat.policy,
                    version=turn.sample.version,
                    engine=turn.sample.engine,
                )
                for turn in self.turns
                if turn.agent == agent and turn.row == number
            )
            rows.append(
                Trajectory(
                    agent=agent,
                    policy=seat.policy,
                    token_ids=tuple(row.token_ids),
                    action_mask=tuple(row.action_mask),
                    logprobs=tuple(row.logprobs),
                    turns=turns,
                    messages=tuple(row.messages),
                )
            )
        return tuple(rows)


class EpisodePlayer:
    """Plays episodes of any of its environments with the agents in their seats.

    Args:
        environments: a template of each environment by name; episodes play on copies.
        seats: who decides for each agent.
        engine: where decisions are sampled.
        max_turns: decisions of the environment after which an episode is cut short.
        step_timeout: seconds that one ``reset`` or ``step`` may take.
        retries: how many times a failed episode is started again.
        workers: threads that step environments side by side.
        processes: host processes that environments live in; 0 keeps them in this process.

    Raises:
        ConfigurationError: an agent of an environment has no seat.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        seats: Mapping[str, Seat],
        engine: Engine,
        *,
        max_turns: int = 64,
        step_timeout: float = 60.0,
        retries: int = 2,
        workers: int = 4,
        processes: int = 0,
    ) -> None:
        for environment in environments.values():
            for agent in environment.agents:
                if agent not in seats:
                    raise ConfigurationError(
                        f"agent {agent!r} of environment {environment.name!r} has no seat; "
                        f"bind it to a policy with `seats: {{{agent}: POLICY}}`"
                    )
        if retries < 0 or processes < 0 or workers < 1 or not step_timeout > 0:
            raise ConfigurationError(
                f"retries is {retries}, processes {processes}, workers {workers} and step_timeout {step_timeout}; "
                "retries and processes must be 0 or above, workers 1 or above, step_timeout above 0"
            )
        for environment in environments.values():
            if processes and inspect.iscoroutinefunction(environment.step):
                raise ConfigurationError(
                    f"environment {environment.name!r} is async, and processes is {processes}; host processes are for "
                    "environments that block, so set processes to 0"
                )
        self.hosts = EnvironmentHosts(processes, step_timeout) if processes else None
        host = self.hosts.host if self.hosts else _itself
        self.environments = {name: host(environment) for name, environment in environments.items()}
        self.seats, self.engine = dict(seats), engine
        self.max_turns, self.retries = max_turns, retries
        # A host needs a thread that waits for it, and the time in which its process starts counts as well.
        deadline = step_timeout + 2 * STARTUP_SECONDS if processes else step_timeout
        # One thread for each host: a second one would wait for the first with its own deadline running.
        self.caller = EnvironmentCaller(workers=processes or workers, timeout=deadline)
        self._broken: list[Environment] = []
        self._idle: dict[str, list[Environment]] = {name: [] for name in environments}
        self._loop: EventLoopThread | None = None

    def play_blocking(self, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        """:meth:`play` on an event loop of the player's own, while the calling thread computes for the engine."""
        if self._loop is None:
            self._loop = EventLoopThread()
        loop, started = self._loop, list[Future[list[Episode]]]()

        def start() -> Future[list[Episode]]:
            started.append(loop.submit(self.play(specs)))
            return started[0]

        try:
            return self.engine.compute_during(start)
        except BaseException:
            for playing in started:
                playing.cancel()
            raise

    async def play(self, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        """One finished record per spec, in order; failures are records with ``error`` set."""
        plays = [self._start(spec, attempt=1) for spec in specs]
        fresh = list(range(len(plays)))
        while fresh or any(not play.over for play in plays):
            await self._reset([plays[index] for index in fresh])
            waiting = [play for play in plays if not play.over]
            await self._decide(waiting)
            await self._step([play for play in waiting if not play.over])
            fresh = []
            for index, play in enumerate(plays):
                if play.over and play.error is not None and play.attempt <= self.retries:
                    self._finish(play)
                    plays[index] = self._start(play.spec, play.attempt + 1)
                    fresh.append(index)
            await self._close_broken()
        for play in plays:
            self._finish(play)
        await self._close_broken()
        return [play.episode(self.seats) for play in plays]

    def close(self) -> None:
        """Close all environments; may be called twice."""
        with ExitStack() as stack:  # all of them, also when one cannot be closed
            if self._loop is not None:
                stack.callback(self._loop.close)
                self._loop = None
            if self.hosts is not None:
                stack.callback(self.hosts.close)
            for name, environments in self._idle.items():
                for environment in environments:
                    stack.callback(environment.close)
                self._idle[name] = []

    def _start(self, spec: EpisodeSpec, attempt: int) -> _Play:
        name = spec.task.environment
        if name not in self.environments:
            raise ConfigurationError(f"task {spec.task.key!r} is of an environment that this run does not have")
        idle = self._idle[name]
        return _Play(spec, idle.pop() if idle else self.environments[name].copy(), attempt)

    def _finish(self, play: _Play) -> None:
        self.engine.release(f"{play.spec.id}/")
        # An instance that failed may be in any state (or still be held by a stuck call): it is not used again.
        if play.error is None:
            self._idle[play.spec.task.environment].append(play.environment)
        else:
            self._broken.append(play.environment)

    async def _close_broken(self) -> None:
        broken, self._broken = self._broken, []
        for environment, result in zip(
            broken, await self.caller.run([Call(environment.close, ()) for environment in broken]), strict=True
        ):
            if result.error is not None:
                logger.warning("closing a failed %r environment: %s", environment.name, result.error)

    async def _reset(self, plays: Sequence[_Play]) -> None:
        calls = [Call(play.environment.reset, (play.spec.task,)) for play in plays]
        for play, result in zip(plays, await self.caller.run(calls), strict=True):
            play.environment_seconds += result.seconds
            try:
                observations: Observations = result.value_or_raise()
                play.order.began(observations)
                play.observe(observations, self.seats)
            except _FATAL:
                raise
            except Exception as error:  # any other fault of an environment becomes a record
                play.error = _describe(error, play, "reset")

    async def _decide(self, plays: Sequence[_Play]) -> None:
        """Sample every decision that is due, in one engine call."""
        requests: list[SampleRequest] = []
        owners: list[tuple[_Play, str]] = []
        for play in plays:
            if play.steps >= self.max_turns:
                play.cut("turn_limit")
                continue
            due = [(agent, play.conversations[agent].row.token_ids) for agent in play.order.due]
            if any(len(context) >= self.seats[agent].context_window for agent, context in due):
                play.cut("context_window")
                continue
            for agent, context in due:
                seat = self.seats[agent]
                requests.append(
                    SampleRequest(
                        token_ids=tuple(context),
                        policy=seat.policy,
                        seed=derive_seed("turn", play.spec.seed, agent, play.steps),
                        sampling=seat.sampling,
                        stop_ids=seat.chat.stop_ids,
                        session=f"{play.spec.id}/{agent}",
                    )
                )
                owners.append((play, agent))
        if not requests:
            return
        started = time.perf_counter()
        samples = await self.engine.sample(requests)
        share = (time.perf_counter() - started) / len(requests)
        for (play, agent), sample in zip(owners, samples, strict=True):
            play.generate_seconds += share
            play.record(agent, sample)

    async def _step(self, plays: Sequence[_Play]) -> None:
        calls = [Call(play.environment.step, (dict(play.actions),)) for play in plays]
        for play, result in zip(plays, await self.caller.run(calls), strict=True):
            play.environment_seconds += result.seconds
            try:
                play.order.check_actions(play.actions)
                play.take(result.value_or_raise(), self.seats)
            except _FATAL:
                raise
            except Exception as error:  # any other fault of an environment becomes a record
                play.error = _describe(error, play, "step")


def _itself(environment: Environment) -> Environment:
    return environment


def _describe(error: Exception, play: _Play, phase: str) -> str:
    return f"{type(error).__name__} in {phase} of {play.spec.task.key} at turn {play.steps}: {error}"
