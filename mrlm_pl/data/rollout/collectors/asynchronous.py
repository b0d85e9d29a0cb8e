"""Collections that are played while the learner updates, never further ahead than a bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data.rollout.collectors.groups import Collected, GroupDraft, GroupPlan
from mrlm_pl.data.rollout.collectors.players import GroupPlayer, Players
from mrlm_pl.data.rollout.collectors.staleness import Lags
from mrlm_pl.data.rollout.metrics import token_count
from mrlm_pl.engines import ContinuousEngine, RoutingEngine, Sampling
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.learner.contract import RolloutLearner
from mrlm_pl.rollout.player import EpisodePlayer

T = TypeVar("T")
logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_TOLD = 5
_ADVICE = "an async environment must await what it waits for; or raise data.async_options.patience"
"""Episodes that a message about waiting names at most."""


@dataclass(frozen=True)
class AsyncOptions:
    """How episodes are played while the learner updates.

    Args:
        episodes: played at the same time at most; a turn tree counts as one. None: as many as ``max_lag`` lets begin.
        piece: tokens of a turn that are sampled before other turns may join and new weights may be used.
        rows: turns that are sampled together at most.
        over_age: what becomes of groups in a checkpoint that are older than ``max_lag`` allows now: ``drop`` plays
            them again, ``reweight`` learns from them, which takes a ``correction`` in the algorithm. Both are counted.
        patience: seconds in which no episode moves and no piece is sampled before the run ends; the error says what
            each one waits for.

    Raises:
        ConfigurationError: a value out of range.
    """

    episodes: int | None = None
    piece: int = 32
    rows: int = 256
    over_age: Literal["drop", "reweight"] = "drop"
    patience: float = 600.0

    def __post_init__(self) -> None:
        if self.over_age not in ("drop", "reweight"):
            raise ConfigurationError(f"over_age is {self.over_age!r}; choose drop or reweight")
        counts = {"piece": self.piece, "rows": self.rows, "episodes": 1 if self.episodes is None else self.episodes}
        for name, value in counts.items():
            if value < 1:
                raise ConfigurationError(f"data.async_options.{name} is {value}; it must be 1 or above")
        if not self.patience > 0:
            raise ConfigurationError(f"data.async_options.patience is {self.patience}; it must be above 0 seconds")


@dataclass
class _Group:
    """An admitted group: the task that plays it, or its episodes from a checkpoint."""

    playing: asyncio.Task[None] | None = None
    collected: Collected | None = None
    completed: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        return self.collected is not None


class AsyncCollector:
    """Plays groups on its own event loop, while the trainer's thread updates the weights.

    A version of the weights is the result of an iteration's updates. The weights at the start of an iteration are
    published: they sample from then on. A group of iteration k begins when the weights of iteration ``k - max_lag`` are
    published, not before. Iterations train in their order, so no token that trains is more than ``max_lag`` versions
    old, no episode is discarded, and which group belongs to which iteration does not depend on timing.

    Args:
        players: make the players of episodes and give the engine its weights.
        learner: whose policies decide.
        plan: which episodes there are.
        sampling: how turns are sampled.
        max_lag: greatest age of a token that trains, in versions; at least 1.
        groups: numbers of this rank's groups in an iteration.
        iterations: of the whole run; none after the last is begun.
        options: see :class:`AsyncOptions`.
    """

    def __init__(
        self,
        players: Players,
        learner: RolloutLearner,
        plan: GroupPlan,
        sampling: Sampling,
        max_lag: int,
        groups: Sequence[int],
        iterations: int,
        options: AsyncOptions,
    ) -> None:
        self.players, self.learner, self.plan, self.sampling = players, learner, plan, sampling
        self.max_lag, self.groups, self.iterations, self.options = max_lag, list(groups), iterations, options
        self.lags = Lags(max_lag, [name for name in learner.policies if learner.policy(name).trained])
        self._loop = EventLoopThread()
        self._engine = players.engine(learner)
        self._pieces: ContinuousEngine | None = None
        self._player: GroupPlayer | None = None
        self._admitted: dict[tuple[int, int], _Group] = {}
        self._restored: dict[tuple[int, int], Collected] = {}
        self._dropped = self._reweighted = 0
        self._begun = self._since = time.monotonic()
        self._busy = self._tokens = 0.0

    # In the trainer's thread.

    def collect(self, iteration: int, version: int, groups: Sequence[int]) -> Collected:
        """Publish the current weights, begin the groups that may use them, and return the groups of an iteration.

        Waits until all of these are complete; all ranks call it together.

        Raises:
            RolloutError: no episode has moved for a long time.
        """
        self.players.publish(self.learner, version)
        self.lags.published(iteration, version)
        if self._player is None:  # an engine with weights knows whether it takes pieces
            self._player = self._make_player()
        began = time.monotonic()
        self._do(self._admit(iteration))
        found = self._engine.compute_during(lambda: self._submit(self._complete(iteration, groups)))
        for number in groups:  # only now: a run that is ended while it waits keeps them for its checkpoint
            del self._admitted[iteration, number]
        collected, restored = Collected(), 0.0
        for group in found:
            assert group.collected is not None
            collected.add(group.collected)
            restored += group.playing is None and token_count(group.collected.played)
        now = time.monotonic()
        collected.metrics = self.lags.metrics(iteration, collected.episodes)
        ages = [now - group.completed for group in found]
        collected.metrics |= {
            "async/queue_age": (math.fsum(ages), float(len(ages))),
            "async/learner_idle": (now - began, now - self._since),
            "async/groups_in_flight": (float(sum(not group.done for group in self._admitted.values())), 1.0),
            "async/dropped_groups": (float(self._dropped), 1.0),
            "async/reweighted_groups": (float(self._reweighted), 1.0),
        }
        # An iteration that was played during earlier updates is complete at once: its own rate means nothing.
        collected.seconds, collected.earlier_tokens = now - self._begun, self._tokens - restored
        self._tokens += token_count(collected.played) - restored
        if self._pieces is not None:
            busy, seconds = self._pieces.busy_seconds, now - self._since
            collected.metrics["async/engine_idle"] = (max(0.0, seconds - (busy - self._busy)), seconds)
            self._busy = busy
        self._since = now
        self._dropped = self._reweighted = 0
        return collected

    def _make_player(self) -> GroupPlayer:
        options = self.options
        if self._engine.takes_pieces:
            self._engine = self._pieces = ContinuousEngine(self._engine, options.piece, options.rows)
        elif isinstance(self._engine, RoutingEngine) and self._engine.engine.takes_pieces:
            # A server batches its requests itself.
            self._pieces = ContinuousEngine(self._engine.engine, options.piece, options.rows)
            self._engine = RoutingEngine(self._pieces, self._engine.elsewhere)
        return self.players.of_groups(
            self.learner,
            self.plan,
            self.sampling,
            engine=self._engine,
            loop=self._loop,
            slots=asyncio.Semaphore(options.episodes) if options.episodes else contextlib.nullcontext(),
        )

    def state(self) -> dict[str, Any]:
        """Return the complete groups that have not trained yet, as plain values for the checkpoint."""
        # Not on the loop, which an environment may block: a run that is ended could not be saved.
        admitted = list(self._admitted.items())
        complete = self._restored | {key: group.collected for key, group in admitted if group.collected is not None}
        found = [[*key, *group.to_plain()] for key, group in sorted(complete.items(), key=lambda item: item[0])]
        return {"published": self.lags.state(), "complete": found, "made_with": self._made_with()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned; unfinished groups start again.

        All start again, with a warning, when they were played with other options.
        """
        self.lags.load(state["published"])
        now = self._made_with()
        changed = sorted(name for name in now if state["made_with"].get(name) != now[name])
        if changed and state["complete"]:
            self._dropped = len(state["complete"])
            logger.warning(
                "%d groups of the checkpoint are played again: %s changed", self._dropped, ", ".join(changed)
            )
            return
        drop, old = self.options.over_age == "drop", 0
        for iteration, group, *plain in state["complete"]:
            found = Collected.from_plain(*plain)
            too_old = self.lags.largest(iteration, found.episodes) > self.max_lag
            old += too_old
            if not (too_old and drop):
                self._restored[iteration, group] = found
        self._dropped, self._reweighted = (old, 0) if drop else (0, old)
        if old:
            logger.warning(
                "%d groups of the checkpoint are older than data.max_lag %d allows and are %s",
                old,
                self.max_lag,
                "played again" if drop else "used for training all the same",
            )

    def _made_with(self) -> dict[str, str]:
        """Return what decides which episodes a group has, and how they train, as text."""
        agents = {agent for item in self.players.environments.values() for agent in item.agents}
        return self.plan.made_with() | {
            "data.sampling": repr(self.sampling),
            "model.seats": repr({agent: self.learner.seat(agent) for agent in sorted(agents)}),
            "the turn tree": repr(self.learner.turn_tree),
            "the greedy baseline": repr(self.learner.uses_greedy_baseline),
        }

    def close(self) -> None:
        """Stop all episodes and release their environments; may be called twice."""
        if self._loop.closed:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.close)
            for player in self._players():
                stack.callback(player.close)
            # First: other episodes of a group that has failed still play, and need their environments open.
            stack.callback(self._loop.cancel_all)

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._submit(coroutine).result()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return self._loop.submit_watched(coroutine, self.options.patience, _ADVICE)

    # On the event loop.

    async def _admit(self, iteration: int) -> None:
        """Begin the groups of all iterations up to ``max_lag`` ahead."""
        last = max(iteration, min(iteration + self.max_lag, self.iterations - 1))
        for ahead in range(iteration, last + 1):
            for number in self.groups:
                key = (ahead, number)
                if key in self._admitted:
                    continue
                group = self._admitted[key] = _Group(collected=self._restored.pop(key, None))
                if not group.done:
                    group.playing = asyncio.get_running_loop().create_task(self._play(group, *key))

    async def _play(self, group: _Group, iteration: int, number: int) -> None:
        assert self._player is not None
        draft = GroupDraft(self.plan, iteration, number)
        greedy = asyncio.ensure_future(self._player.play_greedy(iteration, [number]))
        try:
            while draft.due:
                await self._player.play_due([draft])
            collected = draft.collected(await greedy)
        finally:
            greedy.cancel()
            await asyncio.gather(greedy, return_exceptions=True)
        group.collected, group.completed = collected, time.monotonic()

    async def _complete(self, iteration: int, numbers: Sequence[int]) -> list[_Group]:
        """Return the groups of an iteration when all are done; a failure in any group is raised at once."""
        groups = [self._admitted[iteration, number] for number in numbers]
        moves, moved = self._moves(), time.monotonic()
        while True:
            playing = [group.playing for group in self._admitted.values() if group.playing is not None]
            for task in playing:
                if task.done():
                    task.result()
            missing = {group.playing for group in groups if not group.done and group.playing is not None}
            if not missing:
                return groups
            await asyncio.wait(missing, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._moves() != moves:
                moves, moved = self._moves(), time.monotonic()
            elif time.monotonic() - moved > self.options.patience:
                raise RolloutError(
                    f"the learner waits for {len(missing)} groups of iteration {iteration}, and no episode has moved "
                    f"for {self.options.patience:g} s: {self._waiting()}; look there, or raise "
                    "data.async_options.patience"
                )

    def _moves(self) -> tuple[int, int]:
        """Return counters that grow while there is progress: moves of episodes, and chunks of turns."""
        played = sum(player.moves for player in self._players())
        return played, 0 if self._pieces is None else self._pieces.batches

    def _players(self) -> list[EpisodePlayer]:
        return [] if self._player is None else self._player.players

    def _waiting(self) -> str:
        """Return the longest waiting episodes and their reasons, as text."""
        plays = [play for player in self._players() for play in player.playing.values()]
        plays.sort(key=lambda play: play.waits_since)
        now = time.monotonic()
        told = [
            f"episode {play.id} ({play.spec.task.key}) waits for {play.waits_for} for {now - play.waits_since:.0f} s"
            for play in plays[:_TOLD]
        ]
        return ", ".join(told) + (f" and {len(plays) - _TOLD} more" if len(plays) > _TOLD else "")


def groups_ahead(
    parts: Sequence[dict[str, Any] | None], groups: int, here: range, overlaps: bool
) -> dict[str, Any] | None:
    """Return the state of this rank's collector, of the states of all ranks that saved a checkpoint; None without any.

    Args:
        parts: what :meth:`AsyncCollector.state` returned on each rank; None where nothing was played ahead.
        groups: in an iteration, over all ranks.
        here: numbers of this rank's groups, which may have been another rank's.
        overlaps: whether this run plays ahead; otherwise a warning says that these groups are played again.
    """
    saved = [part for part in parts if part is not None]
    found = {(item[0], item[1]): item for part in saved for item in part["complete"]}
    if found and not overlaps:
        logger.warning(
            "%d groups of the checkpoint, which an asynchronous run has played ahead, are played again", len(found)
        )
    if not saved or not overlaps:
        return None
    # Numbers above the last group are kept too: the collector counts and names them as dropped.
    own = [item for (_, number), item in sorted(found.items()) if min(number, groups - 1) in here]
    return {**saved[0], "complete": own}
