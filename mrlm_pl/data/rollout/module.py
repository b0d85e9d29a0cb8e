"""The rollout data module: a sized, stateful stream of mini-batches from episodes of the current policy."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from mrlm_pl.data.rollout.alarms import SignalCheck, VerifierWatch
from mrlm_pl.data.rollout.checkpoint import own_groups_ahead, rows_from_state, rows_to_state
from mrlm_pl.data.rollout.checks import check_fit, check_kept, check_learns, check_played
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncCollector, AsyncOptions
from mrlm_pl.data.rollout.collectors.groups import FailedMembers, GroupPlan, GroupRules, check_failure_rule
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.data.rollout.collectors.stale_snapshots import StaleSnapshots
from mrlm_pl.data.rollout.collectors.synchronous import Collected, SyncCollector
from mrlm_pl.data.rollout.metrics import CollectionSums, RunTotals, reward_sums, success_counts
from mrlm_pl.data.rollout.minibatches import Cut, micro_batch
from mrlm_pl.data.rollout.observer import show_collection
from mrlm_pl.data.rollout.stream import EvaluationStream, TrainingStream
from mrlm_pl.data.rollout.tasks.curriculum import SuccessRateCurriculum
from mrlm_pl.data.rollout.tasks.environments import RunTasks, TaskSettings, worth
from mrlm_pl.engines import Engine, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import EpisodeWriter
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.report import EvaluationReport, evaluation_specs, summarize
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.ranks import at_first_rank, data_parallel_rank, each_share, sum_over_ranks
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import as_settings
from mrlm_pl.trainer.bounds import batches_in_all, batches_served
from mrlm_pl.trainer.termination import ended_by_sigterm, leaving_at_sigterm

logger = logging.getLogger(__name__)


class RolloutDataModule(LightningDataModule):
    """Collects episodes with the current weights and serves them as mini-batches.

    An iteration is one collection of ``groups`` tasks with ``group_size`` episodes each, followed by ``passes`` times
    ``minibatches`` optimizer updates on it. With ``accumulate_grad_batches`` of the trainer, an update is cut into that
    many pieces; the result does not depend on it. All randomness is a function of ``seed`` and the position, so the
    iteration, the position in it and its rows are all that a checkpoint holds.

    Logged once an iteration under ``rollout/``: ``reward``, ``success``, ``entropy`` (Monte-Carlo estimate in nats
    per token: the mean of the sampler's ``-log mu``), ``response_tokens`` per turn, ``tokens_per_second`` of the
    collection, ``truncated_turns`` (share cut at ``max_tokens``), ``failed_episodes``, ``zero_variance_groups``,
    ``retries`` (episodes that were started again), ``row_restarts``, ``dropped_groups`` and ``resampled_members``
    (see ``failed_members``), ``resampled_groups`` and ``reward_of_all_groups`` (see ``resample_rounds``), with
    ``cross_policy`` ``stale_turns`` (share that snapshots sampled; they do not count in ``entropy``) and
    ``stale_age`` (their mean age in optimizer steps), and the components and metrics of each environment as
    ``rollout/ENVIRONMENT/NAME``; with several environments, also ``reward``, ``success`` and ``groups`` (how many of
    its tasks the collection was planned with) of each, and with a curriculum its ``success_rate`` and ``weight`` for
    what is planned next. ``stop/REASON`` and ``truncated_episodes`` are shares of the episodes. With several agents
    or policies there are also ``rollout/agent/NAME/...`` and ``rollout/policy/NAME/...``; see
    :func:`mrlm_pl.evaluation.agents.means_by_agent`. What the run has played so far is logged as ``progress/...``; see
    :class:`~mrlm_pl.data.rollout.metrics.RunTotals`.

    Args:
        environment: where episodes are played; several make a multi-task run.
        names: a name for each environment, in their order, where two would share one (levels of difficulty); None is
            their own.
        task_settings: what differs for the tasks of an environment, by its name.
        weights: share of the tasks for each environment; None is equal shares.
        curriculum: lets the shares follow how often each environment is solved; see :class:`SuccessRateCurriculum`. The
            shares of an iteration are decided when its first group may begin, from the iterations that were learnt from
            by then.
        groups: tasks in an iteration, over all ranks.
        group_size: episodes of each task; ``task_settings`` may give an environment another number.
        failed_members: what becomes of a group some of whose episodes failed for good, which is no outcome of a task.
            ``shrink`` leaves these out, and the group if fewer are left than the algorithm can compare; ``drop`` leaves
            the whole group out; ``resample`` plays other episodes of the task in their place (a turn tree is played
            again as a whole), and shrinks what still has failed ones then. What is left out is saved all the same. A
            group that is left out is played with another task while ``resample_rounds`` allows.
        member_rounds: how many times ``resample`` plays again in a group.
        resample_rounds: how many times a group whose returns are all equal, and which so carries no signal, is replaced
            by the episodes of another task of the same environment (dynamic sampling of DAPO, arXiv 2503.14476). The
            penalty of ``model.overlong_buffer`` does not count in these returns: it would keep groups whose answers are
            all right, or all wrong, and differ in length alone. What is left then is kept, so that an iteration ends.
            All episodes that were played are saved and count in ``tokens_per_second`` and ``failed_episodes``; the
            other numbers are those of the groups that are kept, so ``reward`` and ``success`` are then not the policy's
            means over the tasks.
        minibatches: optimizer updates in one pass over an iteration's rows.
        passes: passes over an iteration's rows.
        iterations: iterations in an epoch of the trainer.
        sampling: how training episodes are sampled.
        validation_episodes: episodes of each environment that a validation or test loop plays.
        validation_sampling: how these are sampled; None is like ``sampling``.
        max_turns: decisions after which an episode is cut short.
        step_timeout: seconds that one environment step may take.
        retries: how many times a failed episode is started again.
        workers: threads that step environments.
        processes: host processes that environments live in, for slow or unstable ones; 0 keeps them in this process.
        engine: where turns are sampled; None is the in-process engine at the trainer's precision.
        save_episodes: write every collection to ``RUN/episodes``.
        mode: ``sync`` plays a collection while the learner waits; ``async`` plays those to come while it updates.
        max_lag: how many versions old the weights may be, in ``async`` mode, that sampled what is learnt from; a
            version is what the updates on one collection make. 0 leaves nothing to be played meanwhile: it is ``sync``.
        async_options: see :class:`AsyncOptions`.
        cross_policy: lets stale snapshots of the policies sample some of the turns that are learnt from; see
            :class:`~mrlm_pl.rollout.cross_policy.CrossPolicy`. None and a ``share`` of 0 have no snapshots.
        seed: of tasks, sampling and shuffling; the command line passes ``seed_everything``.

    Raises:
        ConfigurationError: a number is below 1, or two environments share a name.
    """

    def __init__(
        self,
        environment: Environment | list[Environment],
        weights: list[float] | None = None,
        curriculum: SuccessRateCurriculum | None = None,
        names: list[str] | None = None,
        task_settings: dict[str, TaskSettings] | None = None,
        groups: int = 8,
        group_size: int = 8,
        failed_members: FailedMembers = "shrink",
        member_rounds: int = 2,
        resample_rounds: int = 0,
        minibatches: int = 1,
        passes: int = 1,
        iterations: int = 100,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        validation_episodes: int = 256,
        validation_sampling: Sampling | None = None,
        max_turns: int = 64,
        step_timeout: float = 60.0,
        retries: int = 2,
        workers: int = 4,
        processes: int = 0,
        engine: Engine | None = None,
        save_episodes: bool = True,
        mode: Literal["sync", "async"] = "sync",
        max_lag: int = 1,
        async_options: AsyncOptions = AsyncOptions(),  # noqa: B008 (frozen)
        cross_policy: CrossPolicy | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        counts = {
            "groups": groups,
            "group_size": group_size,
            "minibatches": minibatches,
            "passes": passes,
            "iterations": iterations,
            "validation_episodes": validation_episodes,
            "max_turns": max_turns,
            "workers": workers,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigurationError(f"data.{name} is {value}; it must be 1 or above")
        if resample_rounds < 0:
            raise ConfigurationError(f"data.resample_rounds is {resample_rounds}; it must be 0 (never) or above")
        if mode not in ("sync", "async") or max_lag < 0:
            raise ConfigurationError(
                f"data.mode is {mode!r} and data.max_lag {max_lag}; the mode is sync or async, the lag 0 or above"
            )
        check_failure_rule(failed_members, member_rounds)
        environments = environment if isinstance(environment, list) else [environment]
        self.tasks = RunTasks(environments, names, task_settings, weights, curriculum, seed)
        self.environments = self.tasks.environments
        self.group_sizes = self.tasks.group_sizes(group_size)
        self.groups, self.group_size, self.resample_rounds = groups, group_size, resample_rounds
        self.failed_members: FailedMembers = failed_members
        self.member_rounds = member_rounds
        self.minibatches, self.passes, self.iterations = minibatches, passes, iterations
        self.sampling = as_settings(Sampling, sampling, "data.sampling")
        self.validation_sampling = as_settings(Sampling, validation_sampling or sampling, "data.validation_sampling")
        self.validation_episodes, self.save_episodes, self.seed = validation_episodes, save_episodes, seed
        self.mode, self.max_lag, self.async_options = mode, max_lag, async_options
        player_options: dict[str, Any] = {
            "max_turns": self.tasks.turn_limits(max_turns),
            "step_timeout": step_timeout,
            "retries": retries,
            "workers": workers,
            "processes": processes,
        }
        self.stale = StaleSnapshots(cross_policy) if cross_policy is not None and cross_policy.share else None
        self.players = Players(self.environments, engine, self.overlaps, player_options, self.stale)
        self._collector: SyncCollector | AsyncCollector | None = None
        self._to_restore: dict[str, Any] | None = None
        self._writer = EpisodeWriter()
        self.iteration = 0
        self.position = 0
        self._rows: dict[str, PolicyBatch] | None = None
        self._metrics: dict[str, float] = {}
        self.totals = RunTotals()
        self._signal: SignalCheck | None = None
        self._verifiers = VerifierWatch()

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        algorithm = self._algorithm()
        agents = [agent for environment in self.environments.values() for agent in environment.agents]
        algorithm.check_agents(dict.fromkeys(agents))
        algorithm.meet_tasks(list(self.environments))
        if stage != "fit":
            return
        check_learns(algorithm)
        check_fit(self, algorithm, self.share()[1], self._accumulation())
        self.totals.start()
        if self.share()[0] == 0:
            self._signal = SignalCheck(self.sampling, compares=algorithm.smallest_group > 1)
        if self.stale is not None:
            self.stale.check(algorithm, self._trainer(), self.sampling)

    def train_dataloader(self) -> TrainingStream:
        return TrainingStream(self)

    def val_dataloader(self) -> EvaluationStream:
        return EvaluationStream(self, "validation")

    def test_dataloader(self) -> EvaluationStream:
        return EvaluationStream(self, "test")

    def predict_dataloader(self) -> EvaluationStream:
        return EvaluationStream(self, "test")

    def teardown(self, stage: str) -> None:
        collector, self._collector = self._collector, None
        try:
            if isinstance(collector, AsyncCollector):
                collector.close()
        finally:
            try:
                self.players.close()
            finally:
                self._writer.finish()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        self._writer.finish()  # a resumed run does not collect again what the checkpoint holds
        ahead = self._collector.state() if isinstance(self._collector, AsyncCollector) else self._to_restore
        return {
            "iteration": self.iteration,
            "position": self.position,
            "rows": at_first_rank(rows_to_state(self._rows)),
            "ahead": at_first_rank(ahead),
            "stale": None if self.stale is None else self.stale.state(),
            "shape": self._shape(),
            "iterations": self.iterations,
            "tasks": self.tasks.state(),
            "totals": self.totals.state(),
            "verifiers": self._verifiers.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.iteration, self.position = state_dict["iteration"], state_dict["position"]
        self.tasks.load(state_dict.get("tasks"))
        before = state_dict.get("iterations", self.iterations)
        if self.iterations != before and self.iteration >= before:
            raise ConfigurationError(
                f"data.iterations is {self.iterations}, but the checkpoint has completed an epoch of {before} "
                f"iterations, which the trainer counts by; resume with data.iterations {before}, and raise "
                "trainer.max_epochs to train further"
            )
        self.totals.load(state_dict.get("totals"))
        self._verifiers.load(state_dict.get("verifiers"))
        ranks, trainer = state_dict["rows"], self._trainer()
        if self.stale is not None:
            self.stale.load_state(state_dict.get("stale"))
        ahead = state_dict.get("ahead", [])
        self._to_restore = own_groups_ahead(ahead, self.groups, self._own_groups(), self.overlaps)
        if self.position:
            for name, value in self._shape().items():
                if state_dict["shape"].get(name, value) != value:
                    raise ConfigurationError(
                        f"{name} is {value}, but the checkpoint is in the middle of a collection with "
                        f"{state_dict['shape'][name]}; resume with that, or from a checkpoint between two collections"
                    )
        if len(ranks) != trainer.world_size and self.position:
            # The rows were shared out among other ranks, and episodes are numbered by collection.
            logger.warning(
                "the checkpoint is of %d processes and this run has %d: the rest of collection %d is dropped",
                len(ranks),
                trainer.world_size,
                self.iteration,
            )
            self.iteration, self.position, self._rows = self.iteration + 1, 0, None
            return
        self._rows = rows_from_state(ranks[trainer.global_rank]) if self.position else None

    def _own_groups(self) -> range:
        # Blocks: with strides, environments that take turns in the stream would each land on one rank.
        rank, ranks = self.share()
        return range(rank * self.groups // ranks, (rank + 1) * self.groups // ranks)

    def _shape(self) -> dict[str, Any]:
        """What decides how a collection is served."""
        return {
            "data.groups": self.groups,
            "data.group_size": self.group_size,
            "data.task_settings": {name: size for name, size in self.group_sizes.items() if size != self.group_size},
            "data.passes": self.passes,
            "data.minibatches": self.minibatches,
            "trainer.accumulate_grad_batches": self._accumulation(),
        }

    # The stream.

    @property
    def cut(self) -> Cut:
        """How a collection is cut into Lightning batches."""
        return Cut(self.passes, self.minibatches, self._accumulation())

    def next_batch(self) -> Batch:
        """The next piece; collects a rollout when the last one is used up."""
        if self._rows is None:
            self._rows = self._collect()
        cut, algorithm, ranks = self.cut, self._algorithm(), self.share()[1]
        if algorithm.collection_over:
            # The stream keeps its length, which schedules and the other ranks rely on; these pieces change nothing.
            batch = Batch({}, {}, cut.accumulation * ranks)
        else:
            piece, update = cut.groups_at(self.position, self._shuffled_groups)
            batch = micro_batch(algorithm, self._rows, piece, update, self._sum_over_ranks)
            batch.pieces, batch.metrics = cut.accumulation * ranks, self._metrics
            batch.on_policy = self.position < cut.accumulation and not self.overlaps and self.stale is None
        self.position += 1
        if self.position == cut.pieces:
            self._rows, self.position, self.iteration = None, 0, self.iteration + 1
        self._metrics = {}
        return batch

    def evaluate(
        self, environment: str, *, split: str, episodes: int, sampling: Sampling | None = None, model: str = ""
    ) -> EvaluationReport:
        """Report of the current weights on tasks of a split; see :func:`mrlm_pl.evaluation.report.evaluate`.

        The ranks share the episodes out, so every rank must ask; all get the report on all of them.
        """
        specs = evaluation_specs(self.environments[environment], episodes, split, self.seed, name=environment)
        rank, ranks = self.share()
        own = self.play(specs[rank::ranks], sampling or self.validation_sampling)
        played: list[Any] = [None] * len(specs)
        for number, share in enumerate(each_share(self._trainer(), own)):
            played[number::ranks] = share
        return summarize(played, environment=environment, model=model, split=split, seed=self.seed, requested=episodes)

    def play(self, specs: Sequence[EpisodeSpec], sampling: Sampling) -> list[Episode]:
        """Episodes played with the current weights."""
        algorithm = self._algorithm()
        player = self.players.player(algorithm, sampling)
        with ended_by_sigterm(self._trainer()):
            return self.players.with_current_weights(algorithm, self._version(), lambda: player.play_blocking(specs))

    def _collect(self) -> dict[str, PolicyBatch]:
        started = time.perf_counter()
        own = self._own_groups()
        self.tasks.plan_until(self.iteration, self._furthest(), self.groups)
        # Outside of what SIGTERM interrupts: a checkpoint has all snapshots that are due, or none.
        self.players.begin(self._algorithm(), self.iteration, self._version())
        with ended_by_sigterm(self._trainer()):
            collected = self._ready_collector(own).collect(self.iteration, self._version(), own)
        seconds = collected.seconds or time.perf_counter() - started
        if self.save_episodes:
            self._save(collected)
        played = [*collected.episodes, *collected.replaced]
        check_played(played, self.iteration, self.environments)
        check_kept(collected.episodes, self.iteration)
        # What an asynchronous run has taken up could not be saved here.
        with nullcontext() if self.overlaps else ended_by_sigterm(self._trainer()):
            rows = self._prepared(collected)
        measured = self._measured(collected, own, seconds)
        metrics = measured.metrics()
        if self._signal is not None:
            self._signal.see(metrics, measured.returns)
        if (parted := self._verifiers.see(measured.means)) and self.share()[0] == 0:
            logger.warning(parted)
        prepared = self._algorithm().take_prepared_metrics()
        totals = self.totals.after(self.iteration + 1, measured.played)
        self._metrics = metrics | prepared | self.tasks.learn(measured.successes) | totals
        show_collection(self._trainer(), played)
        return rows

    def _save(self, collected: Collected) -> None:
        rank, ranks = self.share()
        suffix = f"-rank{rank}" if ranks > 1 else ""
        path = self._run_folder() / "episodes" / f"iteration-{self.iteration:06d}{suffix}.jsonl.gz"
        self._writer.write(path, [*collected.episodes, *collected.replaced, *collected.greedy])

    def _prepared(self, collected: Collected) -> dict[str, PolicyBatch]:
        """The rows that are trained on."""
        algorithm, scales = self._algorithm(), self.tasks.reward_scales
        context, before = self._trainer().precision_plugin.forward_context(), algorithm.progress()
        episodes, greedy = worth(collected.episodes, scales), worth(collected.greedy, scales)
        try:
            with torch.no_grad(), context, algorithm.gathered():
                return algorithm.prepare(episodes, self.sampling, greedy)
        except SIGTERMException:
            algorithm.load_progress(before)  # a resumed run prepares them again
            raise

    def _measured(self, collected: Collected, groups: Sequence[int], seconds: float) -> CollectionSums:
        """What all ranks measured together of a collection, which took this one so many seconds."""
        episodes, unused = collected.episodes, [*collected.replaced, *collected.greedy]
        several = self.tasks.several
        measured = CollectionSums.of(
            episodes, seconds, self._silent, unused, by_task=several, earlier_tokens=collected.earlier_tokens
        )
        measured.means |= collected.metrics
        if self.resample_rounds:
            measured.means["rollout/reward_of_all_groups"] = reward_sums([*episodes, *collected.replaced])
        if self.stale is not None:
            measured.means |= self.stale.metrics(episodes, self._version())
        told = {"dropped_groups": True, "resampled_groups": self.resample_rounds > 0}
        told["resampled_members"] = self.failed_members == "resample"
        measured.sums |= {f"rollout/{name}": collected.counts[name] for name in told if told[name]}
        if several:
            first = self.iteration * self.groups
            planned = Counter(self.tasks.stream.picked(first + group)[0] for group in groups)
            measured.sums |= {f"rollout/{name}/groups": float(planned[name]) for name in self.environments}
        measured.successes = success_counts([*episodes, *collected.replaced])
        return functools.reduce(CollectionSums.plus, each_share(self._trainer(), measured))

    def _silent(self, group: Sequence[Episode]) -> bool:
        return self._algorithm().without_signal(worth(group, self.tasks.reward_scales))

    @property
    def overlaps(self) -> bool:
        """Whether episodes are played while the weights change."""
        return self.mode == "async" and self.max_lag > 0

    def _ready_collector(self, groups: Sequence[int]) -> SyncCollector | AsyncCollector:
        if self._collector is None:
            algorithm = self._algorithm()
            rules = GroupRules(
                self._silent,
                algorithm.smallest_group,
                self.failed_members,
                self.member_rounds,
                trees=algorithm.turn_tree is not None,
            )
            plan = GroupPlan(
                self.tasks.stream, self.groups, self.group_sizes, self.resample_rounds + 1, self.seed, rules
            )
            if self.overlaps:
                self._collector = AsyncCollector(
                    self.players,
                    algorithm,
                    plan,
                    self.sampling,
                    self.max_lag,
                    groups,
                    self._all_iterations(),
                    self.async_options,
                )
                if self._to_restore is not None:
                    self._collector.load_state(self._to_restore)
            else:
                self._collector = SyncCollector(
                    self.players,
                    algorithm,
                    plan,
                    self.sampling,
                    lambda number: float(self._sum_over_ranks(torch.tensor(number))),
                    lambda: leaving_at_sigterm(self._trainer()),
                )
            self._to_restore = None
        return self._collector

    def _furthest(self) -> int:
        """The last iteration whose groups may begin now."""
        return max(self.iteration, min(self.iteration + self.max_lag * self.overlaps, self._all_iterations() - 1))

    def _all_iterations(self) -> int:
        """Number of the collection after the last one, as far as the trainer's bounds tell; no more are begun.

        A trainer counts from 0, and the data may have been in another one before.
        """
        trainer, pieces = self._trainer(), self.cut.pieces
        in_all = batches_in_all(trainer)
        if math.isinf(in_all):
            return sys.maxsize
        return self.iteration - round(batches_served(trainer) / pieces) + math.ceil(in_all / pieces)

    def _shuffled_groups(self, pass_number: int) -> Tensor:
        """This rank's group numbers, in the order in which a pass serves them."""
        rank, ranks = self.share()
        generator = torch.Generator().manual_seed(derive_seed("shuffle", self.seed, self.iteration, pass_number, rank))
        return torch.randperm(self.groups // ranks, generator=generator)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return sum_over_ranks(self._trainer(), values)

    # What the trainer knows.

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise ConfigurationError("the rollout data module is not attached to a trainer; pass it to `trainer.fit`")
        return self.trainer

    def _algorithm(self) -> Algorithm:
        module = self._trainer().lightning_module
        if not isinstance(module, Algorithm):
            raise ConfigurationError(f"{type(module).__name__} is not an Algorithm; a rollout needs its policies")
        return module

    def share(self) -> tuple[int, int]:
        """This process's number among those that share the data out, and how many these are."""
        return data_parallel_rank(self._trainer())

    def _accumulation(self) -> int:
        return int(self._trainer().accumulate_grad_batches)

    def _version(self) -> int:
        return int(self._trainer().global_step)

    def _run_folder(self) -> Path:
        return Path(self._trainer().default_root_dir)
