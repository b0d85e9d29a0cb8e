"""Collections that are played while the learner updates, never further ahead than a bound."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrlm_pl.concurrency.calls import wait_awake
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data.rollout.collectors.groups import Collected, Collector, GroupPlan, PlaySpecs, UnfinishedGroup
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.data.rollout.metrics import token_count
from mrlm_pl.engines import ContinuousEngine, RoutingEngine, Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import RolloutError, counted
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.settings import PositiveFloat, PositiveInt, Settings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_NAMED = 5
"""Maximum number of episodes that a message about waiting names."""

_ADVICE = "an async environment must await (asyncio.sleep, not time.sleep); or raise data.async_options.patience"


@dataclass(frozen=True)
class AsyncOptions(Settings):
    """Settings of playing while the learner updates.

    Args:
        episodes: maximum number of concurrent episodes; a turn tree counts as one. None plays as many as ``max_lag``
            lets begin.
        chunk_tokens: tokens of a turn that are sampled before other turns may join and new weights may be used.
        rows: maximum number of turns that are sampled together.
        patience: seconds without a step of an episode or a sampled chunk after which the run ends; the error says what
            each episode waits for.

    Raises:
        ConfigurationError: a value out of range.
    """

    episodes: PositiveInt | None = None
    chunk_tokens: PositiveInt = 32
    rows: PositiveInt = 256
    patience: PositiveFloat = 600.0


class Lags:
    """Counts tokens by their lag: the number of iterations between the weights that sampled and those that train.

    Weights are published at the beginning of each iteration; turns record their version, the number of optimizer steps.

    Args:
        bound: largest intended lag.
        policies: names of the policies whose tokens count: those that are trained here.

    >>> lags = Lags(2, ["main"])
    >>> for iteration, step in enumerate((0, 4, 8)):
    ...     lags.published(iteration, step)
    >>> lags.of(iteration=2, version=4), lags.of(iteration=2, version=9)
    (1, 0)
    """

    def __init__(self, bound: int, policies: Sequence[str]) -> None:
        self.bound, self.policies = bound, frozenset(policies)
        self._versions: dict[int, int] = {}  # by iteration

    def published(self, iteration: int, version: int) -> None:
        """Record the optimizer step of the weights that an iteration begins with."""
        self._versions.setdefault(iteration, version)  # a run may be resumed in the iteration
        self._versions = dict([*self._versions.items()][-2 * self.bound - 2 :])

    def of(self, iteration: int, version: int) -> int:
        """Return the lag, in an iteration, of a token that weights of this version sampled."""
        # A version before the oldest one remembered is at least one older.
        before = min(self._versions) - 1
        return iteration - max((begun for begun, at in self._versions.items() if at <= version), default=before)

    def exceeded(self, iteration: int, episodes: Sequence[Episode]) -> bool:
        """Return whether the lag of a token in these episodes exceeds the bound."""
        return any(lag > self.bound for lag in self._counts(iteration, episodes))

    def metrics(self, iteration: int, episodes: Sequence[Episode]) -> dict[str, tuple[float, float]]:
        """Return (sum, count) of the mean lag, of each lag's share of tokens, and of turns with several versions."""
        counts = self._counts(iteration, episodes)
        total = float(sum(counts.values()))
        turns = list(self._turns(episodes))
        means = {
            "async/lag": (float(sum(lag * tokens for lag, tokens in counts.items())), total),
            "async/mixed_turns": (float(sum(bool(turn.spans) for turn in turns)), float(len(turns))),
        }
        for lag in range(self.bound + 1):
            means[f"async/lag_{lag}"] = (float(counts[lag]), total)
        return means

    def state(self) -> list[list[int]]:
        """Return the published versions as plain values."""
        return [[*self._versions], [*self._versions.values()]]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Restore the value of :meth:`state`."""
        self._versions = dict(zip(*state, strict=True))

    def _turns(self, episodes: Sequence[Episode]) -> Iterator[Turn]:
        for episode in episodes:
            for row in episode.rows():
                # A turn that other weights than the seat's decided is not of the policy's versions.
                yield from (turn for turn in row.turns if turn.policy == row.policy and turn.policy in self.policies)

    def _counts(self, iteration: int, episodes: Sequence[Episode]) -> Counter[int]:
        counts: Counter[int] = Counter()
        for turn in self._turns(episodes):
            for span in turn.token_spans():
                counts[self.of(iteration, span.version)] += span.tokens
        return counts


@dataclass
class _Group:
    """An admitted group: the task that plays it, or its episodes from a checkpoint."""

    task: asyncio.Task[None] | None = None
    collected: Collected | None = None
    completed: float = field(default_factory=time.monotonic)


class AsyncCollector(Collector):
    """Plays groups on its own event loop, while the trainer's thread updates the weights.

    The weights at the start of an iteration are published: they sample from then on. A group of iteration k begins when
    the weights of iteration ``k - max_lag`` are published, not before. Iterations train in their order, so no token
    that trains is more than ``max_lag`` iterations old, no episode is discarded, and which group belongs to which
    iteration does not depend on timing.

    Args:
        players, plan, sampling: see :class:`Collector`.
        max_lag: greatest age of a token that trains, in iterations; at least 1.
        options: see :class:`AsyncOptions`.
    """

    def __init__(
        self, players: Players, plan: GroupPlan, sampling: Sampling, max_lag: int, options: AsyncOptions
    ) -> None:
        super().__init__(players, plan, sampling)
        learner = players.learner
        self.max_lag, self.options = max_lag, options
        self.lags = Lags(max_lag, [name for name in learner.policies if learner.policy(name).trained])
        self._loop = EventLoopThread(options.patience, _ADVICE)
        self._slots: Any = asyncio.Semaphore(options.episodes) if options.episodes else contextlib.nullcontext()
        self._continuous: ContinuousEngine | None = None
        self._admitted: dict[tuple[int, int], _Group] = {}
        self._dropped = 0
        self._since = time.monotonic()
        # Groups are played during the last max_lag + 1 iterations, so the rate is that of this window.
        self._window = deque([(self._since, 0.0)], maxlen=max_lag + 1)
        self._busy = self._tokens = 0.0

    # In the trainer's thread.

    def collect(self, iteration: int, last: int, groups: Sequence[int]) -> Collected:
        """Publish the current weights, begin the groups that may use them, and return the groups of an iteration.

        Waits until all of these are complete; all ranks call it together.

        Raises:
            RolloutError: no episode has moved for a long time.
        """
        with self.players.published():
            self.lags.published(iteration, self.players.learner.trainer.global_step)
        if not self.episode_players:
            self._make_players()
        began = time.monotonic()
        done = self.training_player.engine.compute_during(
            lambda: self._loop.submit_watched(self._complete(iteration, last, groups))
        )
        for number in groups:  # only now: a run that is ended while it waits keeps them for its checkpoint
            del self._admitted[iteration, number]
        collected, restored = Collected(), 0.0
        for group in done:
            assert group.collected is not None
            collected.add(group.collected)
            restored += group.task is None and token_count(group.collected.played)
        now = time.monotonic()
        collected.metrics = self.lags.metrics(iteration, collected.training)
        ages = [now - group.completed for group in done]
        collected.metrics |= {
            "async/queue_age": (math.fsum(ages), float(len(ages))),
            "async/learner_idle": (now - began, now - self._since),
        }
        collected.sums = {
            "async/groups_in_flight": float(sum(group.collected is None for group in self._admitted.values())),
            "async/dropped_groups": float(self._dropped),
        }
        # An iteration that was played during earlier updates is complete immediately: its own rate means nothing.
        since, tokens_before = self._window[0]
        collected.seconds = now - since
        collected.earlier_tokens = self._tokens - tokens_before - restored
        self._tokens += token_count(collected.played) - restored
        self._window.append((now, self._tokens))
        if self._continuous is not None:
            busy, seconds = self._continuous.busy_seconds, now - self._since
            collected.metrics["async/engine_idle"] = (max(0.0, seconds - (busy - self._busy)), seconds)
            self._busy = busy
        self._since = now
        self._dropped = 0
        return collected

    def _make_players(self) -> None:
        """Make the players; an engine with weights knows whether it takes chunks."""
        engine, routed = self.players.engine, None
        if isinstance(engine, RoutingEngine) and not engine.takes_chunks:  # a server batches its requests itself
            routed, engine = engine, engine.engine
        if engine.takes_chunks:
            engine = self._continuous = ContinuousEngine(engine, self.options.chunk_tokens, self.options.rows)
        if routed is not None:
            engine = RoutingEngine(engine, routed.elsewhere)
        self.make_players(engine=engine, loop=self._loop)
        self.wrap_play(self._one_by_one)

    def state(self) -> dict[str, Any]:
        """Return the complete groups that have not trained yet, as plain values for the checkpoint.

        Groups in which no episode succeeded are played again: the cause of their failure may have ended the run.
        """
        # Not on the loop, which an environment may block: a run that is ended could not be saved.
        admitted = list(self._admitted.items())
        collected = {key: group.collected for key, group in admitted if group.collected is not None}
        complete = {
            key: group for key, group in collected.items() if not all(episode.failed for episode in group.episodes)
        }
        plain_groups = [[*key, *group.to_plain()] for key, group in sorted(complete.items(), key=lambda item: item[0])]
        return {"published": self.lags.state(), "complete": plain_groups, "made_with": self._made_with()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the value of :meth:`state`; unfinished groups start again.

        So do, with a warning, groups that are older than ``max_lag`` allows now, and all of a run with other options.
        """
        self.lags.load(state["published"])
        now = self._made_with()
        changed = sorted(name for name in now if state["made_with"].get(name) != now[name])
        if changed and state["complete"]:
            self._dropped = len(state["complete"])
            dropped = counted(self._dropped, "group")
            logger.warning("playing %s of the checkpoint again: %s changed", dropped, ", ".join(changed))
            return
        self._dropped = 0
        for iteration, group, *plain in state["complete"]:
            collected = Collected.from_plain(*plain)
            if self.lags.exceeded(iteration, collected.training):
                self._dropped += 1
            else:
                self._admitted[iteration, group] = _Group(collected=collected)
        if self._dropped:
            logger.warning(
                "data.max_lag %d is less than the lag of %s of the checkpoint, played again",
                self.max_lag,
                counted(self._dropped, "group"),
            )

    def _made_with(self) -> dict[str, str]:
        """Return the options that decide which episodes a group has, and how they train, as text."""
        agents = {agent for environment in self.players.environments.values() for agent in environment.agents}
        learner = self.players.learner
        return self.plan.made_with() | {
            "data.sampling": repr(self.sampling),
            "model.seats": repr({agent: learner.seat(agent) for agent in sorted(agents)}),
            "the turn tree": repr(learner.unit.branching),
            "the greedy baseline": repr(learner.uses_greedy_baseline),
            "the branch episodes": repr(learner.unit.branch_rule),
        }

    def close(self) -> None:
        """Stop all episodes and release their environments; may be called twice."""
        if self._loop.closed:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.close)
            for player in self.episode_players:
                stack.callback(player.close)
            # First: other episodes of a group that has failed still play, and need their environments open.
            stack.callback(self._loop.cancel_all)

    # On the event loop.

    def _one_by_one(self, play: PlaySpecs) -> PlaySpecs:
        """Return a function that plays each spec separately, when a slot is free."""

        async def alone(spec: EpisodeSpec) -> Sequence[Any]:
            async with self._slots:
                return await play([spec])

        async def played(specs: Sequence[EpisodeSpec]) -> Sequence[Any]:
            return [result for (result,) in await asyncio.gather(*map(alone, specs))]

        return played

    async def _play(self, group: _Group, iteration: int, number: int) -> None:
        unfinished = UnfinishedGroup(self.plan, iteration, number)
        greedy = asyncio.ensure_future(self.play_greedy(iteration, [number]))
        try:
            while unfinished.due:
                await self.play_due([unfinished])
            unfinished.collected.greedy = await greedy
        finally:
            greedy.cancel()
            await asyncio.gather(greedy, return_exceptions=True)
        group.collected, group.completed = unfinished.collected, time.monotonic()

    async def _complete(self, iteration: int, last: int, numbers: Sequence[int]) -> list[_Group]:
        """Begin the groups up to the last iteration, and return those of this one when all are done.

        A failure in any group is raised immediately.
        """
        for key in itertools.product(range(iteration, last + 1), numbers):
            if key not in self._admitted:
                group = self._admitted[key] = _Group()
                group.task = asyncio.get_running_loop().create_task(self._play(group, *key))
                # If several groups fail, the first error ends the run; without this asyncio reports the others.
                group.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        groups = [self._admitted[iteration, number] for number in numbers]
        moves, still = self._moves(), 0.0
        while True:
            for group in self._admitted.values():
                if group.task is not None and group.task.done():
                    group.task.result()
            missing = [group.task for group in groups if group.collected is None and group.task]
            if not missing:
                return groups
            if not await wait_awake(missing, _POLL_SECONDS):
                still += _POLL_SECONDS
            if self._moves() != moves:
                moves, still = self._moves(), 0.0
            elif still > self.options.patience:
                raise RolloutError(
                    f"the learner waits for {counted(len(missing), 'group')} of iteration {iteration}, and no "
                    f"episode has moved for {self.options.patience:g} s: {self._waiting()}; look there, or raise "
                    "data.async_options.patience"
                )

    def _moves(self) -> tuple[int, int]:
        """Return counters that grow while there is progress: moves of episodes, and chunks of turns."""
        played = sum(player.moves for player in self.episode_players)
        return played, 0 if self._continuous is None else self._continuous.batches

    def _waiting(self) -> str:
        """Return the longest waiting episodes and their reasons, as text."""
        plays = [play for player in self.episode_players for play in player.playing.values()]
        plays.sort(key=lambda play: play.waits_since)
        now = time.monotonic()
        waits = [
            f"episode {play.id} ({play.spec.task.key}) waits for {play.waits_for} for {now - play.waits_since:.0f} s"
            for play in plays[:_NAMED]
        ]
        return ", ".join(waits) + (f" and {len(plays) - _NAMED} more" if len(plays) > _NAMED else "")


def groups_ahead(
    states: Sequence[dict[str, Any] | None], groups: int, here: range, overlaps: bool
) -> dict[str, Any] | None:
    """Return the state of this rank's collector from the states of all ranks that saved a checkpoint; None without any.

    Args:
        states: value of :meth:`AsyncCollector.state` on each rank; None if nothing was played ahead.
        groups: number of groups in an iteration, over all ranks.
        here: indices of this rank's groups, which may have been another rank's.
        overlaps: whether this run plays ahead; otherwise a warning says that the groups are played again.
    """
    saved = [state for state in states if state is not None]
    by_key = {(group[0], group[1]): group for state in saved for group in state["complete"]}
    if by_key and not overlaps:
        logger.warning("playing %s of the checkpoint again: this run is synchronous", counted(len(by_key), "group"))
    if not saved or not overlaps:
        return None
    # Numbers above the last group are kept too: the collector counts and names them as dropped.
    groups_here = [group for (_, number), group in sorted(by_key.items()) if min(number, groups - 1) in here]
    return {**saved[0], "complete": groups_here}
