"""Play episodes: environments observe and judge, engines sample, and records are the result.

Local environments are played in lockstep waves: every episode that waits for a decision is sampled in one engine call,
then every environment is stepped off the event loop. A failure of an environment is not an outcome. The episode is
retried a bounded number of times; if it keeps failing, its record has ``error`` set.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from mrlm_pl.concurrency.calls import EnvironmentCaller
from mrlm_pl.concurrency.event_loop import ASYNC_ADVICE, END_SECONDS, EventLoopThread
from mrlm_pl.engines.base import Engine, sample_checked
from mrlm_pl.environment import Environment
from mrlm_pl.environment.hosts import STARTUP_SECONDS, EnvironmentHosts
from mrlm_pl.environment.tools import clip
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError, MRLMError, NonFiniteError, PolicyError, source_line_of_error
from mrlm_pl.rollout.play import CONTEXT_STOP, TURN_STOP, EpisodeSpec, Play, Seat

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 2000
"""Characters of an environment's error that are recorded and logged; some quote whole outputs or pages."""

_REMEDIES = {
    TURN_STOP: "raise `max_turns`, or lower the environment's `max_calls`",
    CONTEXT_STOP: "send shorter conversations, or use a policy with a longer context",
}

# A NaN reward would poison the weights and a chat template that fails would fail forever: these stop the run.
_FATAL = (NonFiniteError, PolicyError)


class EpisodePlayer:
    """Plays episodes of any of its environments with the agents in their seats.

    Args:
        environments: each environment by name; episodes play on copies.
        seats: seat of each agent of the environments.
        engine: engine that samples the decisions.
        max_turns: number of decisions in an episode after which it is truncated; by environment if they
            differ.
        step_timeout: time limit of one ``reset`` or ``step`` in seconds.
        retries: maximum number of times that a failed episode is started again.
        workers: number of threads that step environments in parallel.
        processes: number of host processes for environments; 0 keeps them in this process.
        loop: event loop that plays the episodes; None is the player's own loop.

    Attributes:
        call: function that returns the results of environment calls; see :meth:`EnvironmentCaller.run`.

    Raises:
        ConfigurationError: an async environment is to be hosted in a process.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        seats: Mapping[str, Seat],
        engine: Engine,
        *,
        max_turns: int | Mapping[str, int] = 64,
        step_timeout: float = 60.0,
        retries: int = 2,
        workers: int = 4,
        processes: int = 0,
        loop: EventLoopThread | None = None,
    ) -> None:
        for environment in environments.values():
            if processes and inspect.iscoroutinefunction(environment.step):
                raise ConfigurationError(
                    f"environment {environment.name!r} is async, and processes is {processes}; host processes are for "
                    "environments that block, so set processes to 0"
                )
        self.hosts = EnvironmentHosts(processes, step_timeout) if processes else None
        self.environments: dict[str, Environment] = {}
        self._idle: dict[str, list[Environment]] = {name: [] for name in environments}
        self._unwanted: list[Environment] = []
        for name, environment in environments.items():
            self.renew(name, environment)
        self.seats, self.engine = dict(seats), engine
        self.max_turns, self.retries = max_turns, retries
        # A host needs a thread that waits for it, and the time in which its process starts counts as well.
        deadline = step_timeout + 2 * STARTUP_SECONDS if processes else step_timeout
        # One thread for each host: a second one would wait for the first with its own deadline running.
        self.caller = EnvironmentCaller(workers=processes or workers, timeout=deadline)
        self.call = self.caller.run
        self._open: dict[int, Environment] = {}
        self._loop, self._own_loop = loop, loop is None
        self.playing: dict[str, Play] = {}
        self.moves = 0
        self._warned: set[tuple[str, str]] = set()

    def play_blocking(self, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        """Run :meth:`play` on the player's event loop, while the calling thread computes for the engine."""
        return self.run_blocking(lambda: self.play(specs))

    def run_blocking(self, play: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a coroutine on the player's loop, while the calling thread computes for the engine."""
        if self._loop is None:
            watched = any(inspect.iscoroutinefunction(item.step) for item in self.environments.values())
            self._loop = EventLoopThread(advice=ASYNC_ADVICE if watched else "")
        loop = self._loop
        return self.engine.compute_during(lambda: loop.submit(play()))

    async def play(self, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        """Return one finished record per spec, in order; failures are records with ``error`` set."""
        plays = await self.reset_with_retries([self.new_play(spec, attempt=1) for spec in specs])
        while decided := await self._decide(plays):
            await self.step(decided)
            plays = await self.reset_with_retries(plays)
            await self.close_unwanted()
        for play in plays:
            self.finish(play)
        await self.close_unwanted()
        return [play.episode(self.seats) for play in plays]

    def close(self) -> None:
        """Close all environments, with a warning for those that cannot be closed; may be called twice."""
        open_ = [self._open.pop(key, None) for key in list(self._open)]  # threads may be closing some
        environments = [environment for environment in open_ if environment is not None]
        self._idle, self._unwanted = {name: [] for name in self._idle}, []
        rounds = math.ceil(len(environments) / self.caller.workers)
        deadline = min(rounds * self.caller.timeout + END_SECONDS, threading.TIMEOUT_MAX)  # the former may be infinite
        loop = self._loop
        with ExitStack() as stack:
            if environments:
                loop = loop or EventLoopThread()
            if loop is not None and self._own_loop:
                stack.callback(loop.close)
                self._loop = None
            stack.callback(self.caller.close)
            if self.hosts is not None:
                stack.callback(self.hosts.close)
            if environments and loop is not None:
                try:
                    loop.submit(self._close(environments)).result(deadline)
                except Exception as error:  # a run that is complete keeps its result
                    fault = str(error) or f"no answer within {deadline:g} s"
                    logger.warning("not all of %d environments were closed: %s", len(environments), fault)

    def renew(self, name: str, environment: Environment) -> None:
        """Play on copies of an environment as it is now, from the next episode on; none may be playing."""
        self.environments[name] = self.hosts.host(environment) if self.hosts else environment
        self._unwanted += self._idle[name]
        self._idle[name] = []

    # The steps of a play, for players that combine them in another way too.

    def new_play(self, spec: EpisodeSpec, attempt: int, retried: tuple[int, int] = (0, 0)) -> Play:
        """Return a play with its own environment, before its reset."""
        name = spec.task.environment
        if name not in self.environments:
            raise ConfigurationError(f"task {spec.task.key!r} is of an environment that this run does not have")
        play = self.playing[spec.id] = Play(spec, self.idle_environment(name), attempt, retried)
        return play

    def idle_environment(self, name: str) -> Environment:
        """Return an instance that plays no episode."""
        idle = self._idle[name]
        return idle.pop() if idle else self.copy_of(self.environments[name])

    def copy_of(self, environment: Environment) -> Environment:
        """Return a copy of an environment; :meth:`close` closes it at the latest."""
        copy = environment.copy()
        self._open[id(copy)] = copy
        return copy

    def finish(self, play: Play, *, keep: bool = True) -> None:
        """Release the environment and the engine's cache of a finished play; without ``keep`` it is not used again."""
        self.playing.pop(play.id, None)
        self.engine.release(f"{play.id}/")
        # An instance that failed may be in any state (or still be held by a stuck call). A truncated one may
        # hold what its next episode would only let go of at its beginning.
        if keep and play.error is None and not play.ended_early:
            self._idle[play.spec.task.environment].append(play.environment)
        else:
            self._unwanted.append(play.environment)

    async def close_unwanted(self) -> None:
        """Close the environments that are not used again; if this is stopped, :meth:`close` closes the rest."""
        unwanted, self._unwanted = self._unwanted, []
        await self._close(unwanted)

    async def _close(self, environments: Sequence[Environment]) -> None:
        calls = [
            partial(
                self._close_awaited if inspect.iscoroutinefunction(environment.close) else self._close_one, environment
            )
            for environment in environments
        ]
        for environment, result in zip(environments, await self.call(calls), strict=True):
            warning_key = (environment.name, type(result.error).__name__)
            if result.error is not None and warning_key not in self._warned:
                self._warned.add(warning_key)
                logger.warning(
                    "closing a %r environment: %s: %s; further errors of this kind are not logged",
                    *warning_key,
                    clip(str(result.error), MAX_ERROR_CHARACTERS),
                )

    def _close_one(self, environment: Environment) -> None:
        self._open.pop(id(environment), None)
        environment.close()

    async def _close_awaited(self, environment: Environment) -> None:
        self._open.pop(id(environment), None)
        close: Any = environment.close  # a coroutine function here
        await close()

    async def reset_with_retries(self, plays: Sequence[Play]) -> list[Play]:
        """Reset the plays that are new, and return all; failed ones are played again, at most ``retries`` times."""
        current = list(plays)

        def due(index: int) -> bool:
            play = current[index]
            return not play.waits_for if play.error is None else play.attempt <= self.retries

        while fresh := list(filter(due, range(len(current)))):
            for index in fresh:
                if (failed := current[index]).error is not None:
                    self.finish(failed)
                    current[index] = self.new_play(failed.spec, failed.attempt + 1, failed.sampled)
            await self.reset([current[index] for index in fresh])
        return current

    async def reset(self, plays: Sequence[Play]) -> None:
        """Reset the environments of new plays; those that fail have their ``error`` set."""
        calls = [partial(play.environment.reset, play.spec.task) for play in plays]
        await self._call("reset", plays, calls, Play.begin)

    def set_waiting(self, plays: Sequence[Play], what: str) -> None:
        """Record what plays wait for; everything before it is done."""
        self.moves += len(plays)
        for play in plays:
            play.waits_for, play.waits_since = what, time.monotonic()

    def stop_at_limits(self, plays: Sequence[Play]) -> list[Play]:
        """Truncate the plays that have reached a limit, and return those that continue.

        A program that waits for a reply cannot be truncated: its play fails.
        """
        windows = {agent: self._window(seat) for agent, seat in self.seats.items()}
        for play in plays:
            reason = "" if play.over else play.limit(self.max_turns, windows)
            if reason == CONTEXT_STOP and not play.program_waits:
                self._warn_of_prompt(play, windows)
            if reason and play.program_waits:
                play.error = (
                    f"ProgramError in step of {play.spec.task.key} at turn {play.steps}: {reason} before the program "
                    f"had ended, so that its reward is unknown; {_REMEDIES[reason]}"
                )
                if reason == CONTEXT_STOP:
                    play.refuse_long_prompts(windows)
            elif reason:
                play.end_early(reason)
        return [play for play in plays if not play.over]

    def _window(self, seat: Seat) -> int:
        """Return the number of tokens that fit into an agent's context; a server may allow fewer than the model."""
        bounds = (seat.context_window, self.engine.window(seat.policy), seat.sampling.max_context)
        return min(bound for bound in bounds if bound)

    def _warn_of_prompt(self, play: Play, windows: Mapping[str, int]) -> None:
        """Warn of an agent's first prompt beyond the context window, once for each environment and agent."""
        task = play.spec.task
        for agent in play.due:
            length, window = play.length(agent), windows[agent]
            if length < window or agent in play.turns or (task.environment, agent) in self._warned:
                continue
            self._warned.add((task.environment, agent))
            ours = window == self.seats[agent].sampling.max_context
            longer = "raise it" if ours else "use a model, or a server, with a longer window"
            logger.warning(
                "the first prompt of agent %r on %s has %d tokens, %s %d: such episodes end before it decides; shorten "
                "the prompt and the tools' descriptions, or %s",
                agent,
                task.key,
                length,
                "sampling.max_context" if ours else "the context window of its policy",
                window,
                longer,
            )

    async def _decide(self, plays: Sequence[Play]) -> list[Play]:
        """Return the plays that continue, with every decision that was due: sampled ones in one engine call."""
        waiting, owners = self.stop_at_limits(plays), []
        for play in waiting:
            for agent in play.due:
                if (scripted := play.spec.scripted(agent, play.steps)) is not None:
                    play.record(agent, scripted)
                else:
                    owners.append((play, agent))
        if not owners:
            return waiting
        requests = [play.request(agent, self.seats[agent], session=f"{play.id}/{agent}") for play, agent in owners]
        started = time.perf_counter()
        self.set_waiting(waiting, "the engine")
        samples = await sample_checked(self.engine, requests)
        share = (time.perf_counter() - started) / len(requests)
        for (play, agent), request, sample in zip(owners, requests, samples, strict=True):
            play.generate_seconds += share
            play.record(agent, self.seats[agent].decision(request, sample))
        return waiting

    async def step(self, plays: Sequence[Play]) -> None:
        """Step the environments of plays whose agents have decided; plays that fail have their ``error`` set."""
        calls = [partial(play.environment.step, dict(play.actions)) for play in plays]
        await self._call("step", plays, calls, Play.take)

    async def _call(
        self, phase: str, plays: Sequence[Play], calls: Sequence[Callable[[], Any]], receive: Callable[..., None]
    ) -> None:
        """Call each play's environment, and let the play receive the answer."""
        self.set_waiting(plays, f"its environment's {phase}")
        for play, result in zip(plays, await self.call(calls), strict=True):
            play.environment_seconds += result.seconds
            play.queue_seconds += result.queued
            try:
                receive(play, result.value_or_raise(), self.seats)
            except _FATAL:
                raise
            except Exception as error:  # any other fault of an environment becomes a record
                line = "" if isinstance(error, MRLMError) else source_line_of_error(error)
                where = f" ({line})" if line else ""
                at = f"{phase} of {play.spec.task.key} at turn {play.steps}{where}"
                play.error = f"{type(error).__name__} in {at}: {clip(str(error), MAX_ERROR_CHARACTERS)}"
