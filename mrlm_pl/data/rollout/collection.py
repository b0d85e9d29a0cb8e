"""Collects the rollouts of a run: plays their groups, saves the episodes, prepares the rows and measures."""

from __future__ import annotations

import copy
import functools
import logging
import shlex
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from mrlm_pl.data.rollout.collectors.asynchronous import AsyncCollector, AsyncOptions, groups_ahead
from mrlm_pl.data.rollout.collectors.groups import Collected, GroupPlan, SyncCollector
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.data.rollout.history import RunTotals, SignalCheck, VerifierWatch
from mrlm_pl.data.rollout.metrics import CollectionSums, outcome_sums, path_weights, token_count
from mrlm_pl.data.rollout.tasks import RunTasks
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import EpisodeRetention, EpisodeWriter, iteration_file, remove_repeated
from mrlm_pl.errors import RolloutError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.contract import RolloutLearner
from mrlm_pl.learner.credit.records import credited
from mrlm_pl.learner.ranks import data_parallel_rank, gather_at_first_rank, gather_ranks
from mrlm_pl.learner.token_measures import TokenMeasures
from mrlm_pl.rollout.rounds import RoundOptions
from mrlm_pl.trainer.termination import ended_by_sigterm

logger = logging.getLogger(__name__)


class CollectionObserver(ABC):
    """Base of Lightning callbacks that are called with every rollout of the data module."""

    @abstractmethod
    def on_collection(self, trainer: Any, episodes: Sequence[Episode]) -> None:
        """Look at the episodes that this rank played in an iteration, failed and replaced ones included.

        Called once in each iteration on every rank, before its first update. It must not change weights. A run that is
        resumed in the middle of an iteration does not call it again, so keep its results in the callback's
        ``state_dict``.
        """


class RolloutCollection:
    """Collects one rollout per iteration, and keeps the rest of a run's state: tasks, sums, groups in advance.

    Logged once an iteration under ``rollout/``: ``reward``, ``success``, ``entropy`` (Monte-Carlo estimate in nats per
    token: the mean of the sampler's ``-log mu``), ``response_tokens`` per turn, ``tokens_per_second`` of the
    collection, ``truncated_turns`` (share truncated at ``max_tokens``), ``failed_episodes``, ``zero_variance_groups``,
    ``retries`` (episodes that were started again), ``row_restarts``, ``dropped_groups`` and ``resampled_members`` (see
    ``failed_members``), ``resampled_groups`` and ``reward_of_all_groups`` (see ``resample_rounds``), with an algorithm
    that branches episodes ``branch_episodes`` and ``branch_tokens`` (number of these episodes and of their generated
    tokens; they count in no mean), with ``cross_policy`` ``stale_turns`` (share that snapshots sampled; they do not
    count in ``entropy``) and ``stale_age`` (their mean age in optimizer steps), and the components and metrics of each
    environment as ``rollout/ENVIRONMENT/NAME``; with several environments, also ``reward``, ``success`` and ``groups``
    (tasks that the collection was planned with) of each, and with a curriculum its ``success_rate`` and ``weight`` in
    the next plan.
    ``stop/REASON`` and ``truncated_episodes`` are shares of the episodes. With several agents or policies there are
    also ``rollout/agent/NAME/...`` and ``rollout/policy/NAME/...``; see
    :func:`mrlm_pl.evaluation.agents.means_by_agent`. The totals of the run are logged as ``progress/...``; see
    :class:`~mrlm_pl.data.rollout.history.RunTotals`.

    Args:
        tasks: environments of the run.
        players: players of the episodes, which also give the engine its weights.
        plan: plan of each iteration's groups; :meth:`begin` adds the rules of the algorithm.
        sampling: sampling settings of the turns.
        rounds: options of synchronous playing in rounds; None plays in lockstep.
        max_lag: greatest age of the weights that sample, in iterations; with 0 the learner waits for the episodes.
        options: options of playing while the learner updates.
        saved: iterations whose episodes are kept in ``RUN/episodes``; None saves no episodes.

    Attributes:
        on_policy: True if the weights that sample equal those of the first update.
        trainer, learner: trainer and algorithm of the fit, set by :meth:`begin`.
        components: names of the logged reward components of the last rollout if it has several; empty with several
            environments.
    """

    trainer: Trainer
    learner: RolloutLearner
    _signal: SignalCheck
    _writes: bool

    def __init__(
        self,
        tasks: RunTasks,
        players: Players,
        plan: GroupPlan,
        sampling: Sampling,
        rounds: RoundOptions | None,
        max_lag: int,
        options: AsyncOptions,
        saved: EpisodeRetention | None,
    ) -> None:
        self.tasks, self.players, self.plan, self.sampling = tasks, players, plan, sampling
        self.rounds, self.max_lag, self.options, self.saved = rounds, max_lag, options, saved
        self.on_policy = not max_lag and players.stale is None
        self.collector: SyncCollector | AsyncCollector | None = None
        self.totals = RunTotals()
        self._writer = EpisodeWriter(saved or EpisodeRetention())
        self._verifiers = VerifierWatch()
        self.components: tuple[str, ...] = ()
        self._initial_states = copy.deepcopy({name: part.state() for name, part in self._parts().items()})

    def begin(self, learner: RolloutLearner) -> None:
        """Attach to the algorithm of a fit, and start the clock."""
        self.trainer, self.learner = learner.trainer, learner
        self.plan = replace(
            self.plan,
            smallest_group=learner.smallest_group,
            lacks_signal=lambda group: learner.lacks_signal(self.tasks.with_reward_scale(group)),
            trees=learner.unit.branching is not None,
            branch_rule=learner.unit.branch_rule,
        )
        compares = learner.smallest_group > 1 or not learner.lacks_signal(())  # or it needs no returns at all
        # Tensor-parallel ranks have the same episodes, which the first of them writes.
        copies = self.trainer.world_size // data_parallel_rank(self.trainer)[1]
        self._writes = self.saved is not None and self.trainer.global_rank % copies == 0
        self._signal = SignalCheck(self.sampling, compares, learner.no_signal_reason)
        if self.max_lag:
            self.collector = AsyncCollector(self.players, self.plan, self.sampling, self.max_lag, self.options)
        else:
            self.collector = SyncCollector(self.players, self.plan, self.sampling, self.rounds)
        self.totals.start()

    def resample(self, sampling: Sampling) -> None:
        """Play with other sampling settings from the next rollout on; see :meth:`Collector.resample`."""
        if self.collector is not None:
            self.collector.resample(sampling)
            self._signal.sample(sampling)
        self.sampling = sampling

    def restart(self) -> None:
        """Reset the state of an algorithm's rollouts, before another algorithm uses the collection."""
        for name, part in self._parts().items():
            part.load(copy.deepcopy(self._initial_states[name]))

    @property
    def groups(self) -> range:
        """Numbers of this rank's groups in an iteration."""
        (rank, ranks), groups = data_parallel_rank(self.trainer), self.plan.groups
        # Blocks: with strides, environments that take turns in the stream would each land on one rank.
        return range(rank * groups // ranks, (rank + 1) * groups // ranks)

    def collect(self, iteration: int, last: int) -> tuple[dict[str, PolicyBatch], dict[str, float]]:
        """Return the rows of an iteration by policy, and the numbers to log.

        Args:
            iteration: index of the iteration, from 0.
            last: last iteration whose groups may begin now.

        Raises:
            RolloutError: all episodes failed.
            SIGTERMException: the signal came; a resumed run collects the iteration again.
        """
        self.write_tokens()  # of the iteration before
        started, trainer, groups = time.perf_counter(), self.trainer, self.groups
        folder = Path(trainer.default_root_dir)
        self.tasks.stream.plan_until(iteration, last, self.plan.groups)
        # Outside of what SIGTERM interrupts: a checkpoint has all snapshots that are due, or none.
        if self.players.stale is not None:
            self.players.stale.begin(self.learner, iteration, trainer.global_step)
        assert self.collector is not None
        with ended_by_sigterm(trainer):
            collected = self.collector.collect(iteration, last, groups)
        seconds = collected.seconds or time.perf_counter() - started
        training = collected.training
        try:
            played = [*collected.episodes, *collected.replaced]
            judging = check_played(played, iteration, trainer)
            warn_if_empty(collected.episodes, iteration)
            # An asynchronous collector has handed these groups out, so a checkpoint could not hold them here.
            with nullcontext() if self.max_lag else ended_by_sigterm(trainer):
                rows = self._prepare(iteration, training, collected)
        finally:
            if self._writes:  # also what cannot be trained on
                everything = collected.played
                self._writer.write(iteration_file(folder, iteration, data_parallel_rank(trainer)), everything)
        metrics = self._record(iteration, collected, groups, seconds, judging)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CollectionObserver):
                callback.on_collection(trainer, played)
        return rows, metrics

    def write_tokens(self) -> None:
        """Write the learner's token measures, if there are any."""
        if (measures := self.learner.metrics.tokens) is not None:
            self.learner.metrics.tokens = None
            if self._writes:
                folder = Path(self.trainer.default_root_dir)
                rank = data_parallel_rank(self.trainer)
                self._writer.write_lines(iteration_file(folder, measures.iteration, rank, "tokens"), measures.lines())

    def _prepare(self, iteration: int, training: Sequence[Episode], collected: Collected) -> dict[str, PolicyBatch]:
        """Return the rows that are trained on, and assign the credit of turns to the saved episodes."""
        learner = self.learner
        episodes, greedy = self.tasks.with_reward_scale(training), self.tasks.with_reward_scale(collected.greedy)
        context = self.trainer.precision_plugin.forward_context()
        before = learner.progress()
        try:
            with torch.no_grad(), context, learner.gathered():
                batches = learner.prepare(episodes, self.sampling, greedy)
        except BaseException:  # also a signal
            learner.load_progress(before)  # a resumed run prepares them again
            raise
        if self.saved is not None:
            policy_batches = {name: batches[name] for name in learner.policies if name in batches}
            collected.put_training(credited(training, episodes, policy_batches))
            if self.saved.tokens is not None and self.saved.keeps_tokens(iteration):
                self.learner.metrics.tokens = TokenMeasures.of(iteration, episodes, policy_batches)
        for rows in batches.values():
            rows.trajectories, rows.turn_baselines = (), ()  # the rows live longer than the episodes
        return batches

    def _record(
        self, iteration: int, collected: Collected, groups: Sequence[int], seconds: float, judging: set[str]
    ) -> dict[str, float]:
        """Add a rollout to the run's totals, curriculum and alarms; return the numbers to log, over all ranks."""
        sums_here = self._measure(iteration, collected, groups, seconds, judging)
        measured = functools.reduce(CollectionSums.plus, gather_ranks(self.trainer, sums_here))
        first = data_parallel_rank(self.trainer)[0] == 0
        metrics = measured.metrics()
        totals = self.totals.after(iteration + 1, measured.played)
        prefix, *others = (f"rollout/{name}/" for name in self.tasks.environments)
        if not others and prefix in measured.components:
            names = tuple(prefix + name for name in measured.components[prefix].means())
            self.components = names if len(names) > 1 else ()
        if first:
            self._signal.add(metrics, measured.returns)
        if (warning := self._verifiers.add(measured.means)) and first:
            logger.warning(warning)
        stream = self.tasks.stream
        learned = stream.update(measured.successes) if stream.curriculum is not None else {}
        return metrics | self.learner.metrics.take_rollout() | learned | totals

    def _measure(
        self, iteration: int, collected: Collected, groups: Sequence[int], seconds: float, judging: set[str]
    ) -> CollectionSums:
        """Return the sums of this rank's episodes."""
        episodes, branches = collected.episodes, collected.branches
        unused = [*collected.replaced, *collected.greedy, *branches]
        several, plan = len(self.tasks.environments) > 1, self.plan
        earlier = collected.earlier_tokens
        measured = CollectionSums.of(episodes, seconds, plan.lacks_signal, unused, branches, several, earlier, judging)
        measured.means |= collected.metrics
        measured.sums |= collected.sums
        if self.players.stale is not None:
            measured.means |= self.players.stale.metrics(episodes, self.trainer.global_step)
        logged = ["dropped_groups", *(["resampled_groups"] if plan.resample_rounds else [])]
        logged += ["resampled_members"] if plan.failed_members == "resample" else []
        measured.sums |= {f"rollout/{name}": collected.counts[name] for name in logged}
        if plan.branch_rule is not None:
            measured.sums["rollout/branch_episodes"] = float(len(branches))
            measured.sums["rollout/branch_tokens"] = token_count(branches)
        if several:
            planned = Counter(self.tasks.stream.picked(iteration * plan.groups + group)[0] for group in groups)
            measured.sums |= {f"rollout/{name}/groups": float(planned[name]) for name in self.tasks.environments}
        if plan.resample_rounds or self.tasks.stream.curriculum is not None:
            judged = [episode for episode in (*episodes, *collected.replaced) if not episode.failed]
            outcomes = outcome_sums(judged, path_weights(judged), judging, by_task=True)
            played = dict.fromkeys(episode.task.environment for episode in judged)
            measured.successes = {  # one that does not judge may have a metric of this name
                name: outcomes.get(f"rollout/{name}/success", (0.0, 0.0)) if name in judging else (0.0, 0.0)
                for name in played
            }
            if plan.resample_rounds:
                measured.means["rollout/reward_of_all_groups"] = outcomes["rollout/reward"]
        return measured

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is not the rows and the position; all ranks call it."""
        self._writer.finish()  # a resumed run does not collect these again
        ahead = None if self.collector is None else self.collector.state()
        state = {"ahead": gather_at_first_rank(ahead), **{name: part.state() for name, part in self._parts().items()}}
        measures = self.learner.metrics.tokens
        return state if measures is None else {**state, "tokens": gather_at_first_rank(measures.state())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the value of :meth:`state`."""
        for name, part in self._parts().items():
            part.load(state.get(name))
        measured = state.get("tokens", ())
        if len(measured) == self.trainer.world_size:
            self.learner.metrics.tokens = TokenMeasures(**measured[self.trainer.global_rank])
        if self.saved is not None and self.trainer.is_global_zero:
            ranks = data_parallel_rank(self.trainer)[1]
            first = state["iteration"] + bool(state["position"])
            remove_repeated(Path(self.trainer.default_root_dir), first, ranks)
        ahead = groups_ahead(state.get("ahead", []), self.plan.groups, self.groups, self.max_lag > 0)
        if isinstance(self.collector, AsyncCollector) and ahead is not None:
            self.collector.load(ahead)

    def _parts(self) -> dict[str, Any]:
        """Return the parts with their own state, by their name in a checkpoint."""
        parts = {"tasks": self.tasks.stream, "totals": self.totals, "verifiers": self._verifiers}
        return parts if self.players.stale is None else {"stale": self.players.stale, **parts}

    def close(self) -> None:
        """Stop all episodes, close the players and finish the files; may be called twice."""
        collector, self.collector = self.collector, None
        self.totals.stop()
        with ExitStack() as stack:
            stack.callback(self._writer.close)
            if hasattr(self, "learner"):
                stack.callback(self.write_tokens)
            stack.callback(self.players.close)
            if collector is not None:
                stack.callback(collector.close)


def first_failure(episodes: Sequence[Episode], folder: Path) -> str:
    """Return the error of the first failed episode, and a command on the run's folder that checks its environment."""
    failed = next(episode for episode in episodes if episode.failed)
    recorded = (folder / "config.yaml").is_file()  # a script's environment is not
    check = (
        f"mrlm check-env --model {shlex.quote(str(folder))}" if recorded else "mrlm_pl.check_environment(environment)"
    )
    return f"{failed.error}; try `{check}`"


def warn_of_failures(episodes: Sequence[Episode], what: str, folder: Path) -> None:
    """Warn of failed episodes.

    Args:
        episodes: episodes that were played.
        what: kind of the episodes, for the message.
        folder: run folder.
    """
    failed = sum(episode.failed for episode in episodes)
    if failed:
        message = "%d of %d %s failed and are left out; the first: %s"
        logger.warning(message, failed, len(episodes), what, first_failure(episodes, folder))


def check_played(episodes: Sequence[Episode], iteration: int, trainer: Any) -> set[str]:
    """Warn of failed episodes, and return the environments that judged any on any rank; every rank must call it.

    Raises:
        RolloutError: all episodes of one rank failed; all ranks raise it, so that each of them reports the cause.
    """
    folder, fault = Path(trainer.default_root_dir), None
    judging_here = {episode.task.environment for episode in episodes if episode.success is not None}
    if all(episode.failed for episode in episodes):
        which = f"every episode of iteration {iteration}"
        which += f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        fault = f"{which} failed, {len(episodes)} in all; the first: {first_failure(episodes, folder)}"
    else:
        warn_of_failures(episodes, "episodes", folder)
    faults, judging = zip(*gather_ranks(trainer, (fault, judging_here)), strict=True)
    if any(faults):
        raise RolloutError(next(filter(None, faults)))
    return set[str]().union(*judging)


def warn_if_empty(episodes: Sequence[Episode], iteration: int) -> None:
    """Warn of a rollout without episodes to train on."""
    if not episodes:
        logger.warning(
            "no group of this process is left to learn from in iteration %d; where no other process has one, its "
            "updates change nothing; see data.failed_members and data.retries",
            iteration,
        )
