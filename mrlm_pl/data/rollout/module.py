"""The rollout data module: a sized, stateful stream of mini-batches from episodes of the current policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from mrlm_pl.data.rollout import checks
from mrlm_pl.data.rollout.collection import RolloutCollection
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.data.rollout.collectors.groups import FailedMembers, GroupPlan
from mrlm_pl.data.rollout.collectors.players import Players, StaleSnapshots
from mrlm_pl.data.rollout.evaluation import EvaluationStream
from mrlm_pl.data.rollout.stream import TrainingStream
from mrlm_pl.data.rollout.tasks import RunTasks, SuccessRateCurriculum, TaskSettings
from mrlm_pl.engines import Engine, Sampling
from mrlm_pl.engines.routing import check_servers
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import EpisodeRetention
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.report import EvaluationReport
from mrlm_pl.evaluation.summary import evaluation_specs, summarize
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.ranks import data_parallel_rank, gather_ranks
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.rounds import RoundOptions
from mrlm_pl.seeding import run_seed
from mrlm_pl.settings import ChecksArguments, NonNegativeInt, PositiveFloat, PositiveInt, as_settings, check_instance


class RolloutDataModule(ChecksArguments, LightningDataModule):
    """Collects episodes with the current weights and serves them as mini-batches.

    An iteration is one rollout of ``groups`` tasks with ``group_size`` episodes each, followed by ``passes`` times
    ``minibatches`` optimizer updates on it. With ``accumulate_grad_batches`` of the trainer, an update is divided into
    that many micro-batches: whole groups, or parts of a group where there are more micro-batches than groups and the
    algorithm allows it, as policy gradients do. The result does not depend on it. All randomness is a function of
    ``seed`` and the position. ``stream`` holds rows and position
    (:class:`~mrlm_pl.data.rollout.stream.TrainingStream`), and
    ``collection`` collects, saves and measures (:class:`~mrlm_pl.data.rollout.collection.RolloutCollection`).

    Args:
        environment: environment of the episodes; several make a multi-task run.
        weights: relative number of groups of each environment, 0 for one that is only evaluated; None weighs all
            equally.
        curriculum: rule that sets the environments' fractions of an iteration's groups from their success rates in the
            iterations that were trained on before its first group may begin; see :class:`SuccessRateCurriculum`.
        names: name of each environment, in their order, if two would share one (levels of difficulty); None takes the
            environments' own names.
        task_settings: settings of individual environments, by name.
        groups: number of tasks in an iteration, over all ranks.
        group_size: number of episodes of each task; ``task_settings`` may override it for an environment.
        failed_members: ``shrink`` leaves failed episodes out, and the group if fewer are left than the algorithm can
            compare; ``drop`` leaves the whole group out; ``resample`` plays other episodes of the task in their place
            (a turn tree as a whole), then shrinks. All are saved. A group that is left out is played with another task
            while ``resample_rounds`` allows.
        member_rounds: maximum number of rounds in which ``resample`` plays again in a group.
        resample_rounds: maximum number of times that a group whose returns are all equal, without a learning signal, is
            replaced by the episodes of another task of the same environment (dynamic sampling of DAPO, arXiv
            2503.14476). These returns leave out ``model.overlong_buffer``. All episodes are saved and count in
            ``tokens_per_second`` and ``failed_episodes``; the other numbers are those of the groups that are kept, so
            ``reward`` and ``success`` are then not the policy's means over the tasks.
        minibatches: number of optimizer updates in one pass over a rollout.
        passes: number of passes over a rollout.
        iterations: number of rollouts in an epoch of the trainer.
        sampling: sampling settings of training episodes; its ``policies`` has settings of individual policies.
        validation_episodes: number of episodes of each environment in a validation or test loop, one of each task; a
            split with fewer tasks is played whole, with a warning. None is 256, or a smaller split whole.
        validation_sampling: sampling settings of validation and test episodes; None takes those of ``sampling``.
        max_turns: number of decisions after which an episode is truncated.
        step_timeout: time limit of one environment step in seconds.
        retries: maximum number of times that a failed episode is started again.
        workers: number of threads that step environments.
        processes: number of host processes of the environments, for slow or unstable ones; 0 keeps them in this
            process.
        engine: engine that samples the turns; None is the in-process engine at the trainer's precision.
        save_episodes: whether to write every rollout to ``RUN/episodes``; or the iterations that are kept there, see
            :class:`~mrlm_pl.episode_files.EpisodeRetention`.
        mode: ``sync`` plays a rollout while the learner waits; ``async`` plays the next ones while it updates.
        rounds: options that let environments answer, in ``sync`` mode, while other episodes are sampled; see
            :class:`~mrlm_pl.rollout.rounds.RoundOptions`. None plays in lockstep: all turns, then all environments.
        max_lag: maximum staleness in ``async`` mode: the age, in iterations, of the weights that sample. 0 is ``sync``.
        async_options: options of ``async`` mode; see :class:`AsyncOptions`.
        cross_policy: division of turns between the policies and stale snapshots of them; see
            :class:`~mrlm_pl.rollout.cross_policy.CrossPolicy`. None and a ``share`` of 0 have no snapshots.
        seed: seed of tasks, sampling and shuffling; None is 0. The command passes ``--seed_everything``.

    Raises:
        ConfigurationError: a number is out of range, or two environments share a name.
    """

    def __init__(
        self,
        environment: Environment | Sequence[Environment],
        weights: list[float] | None = None,
        curriculum: SuccessRateCurriculum | None = None,
        names: list[str] | None = None,
        task_settings: dict[str, TaskSettings] | None = None,
        groups: PositiveInt = 8,
        group_size: PositiveInt = 8,
        failed_members: FailedMembers = "shrink",
        member_rounds: PositiveInt = 2,
        resample_rounds: NonNegativeInt = 0,
        minibatches: PositiveInt = 1,
        passes: PositiveInt = 1,
        iterations: PositiveInt = 100,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        validation_episodes: PositiveInt | None = None,
        validation_sampling: Sampling | None = None,
        max_turns: PositiveInt = 64,
        step_timeout: PositiveFloat = 60.0,
        retries: NonNegativeInt = 2,
        workers: PositiveInt = 4,
        processes: NonNegativeInt = 0,
        engine: Engine | None = None,
        save_episodes: bool | EpisodeRetention = True,
        mode: Literal["sync", "async"] = "sync",
        rounds: RoundOptions | None = None,
        max_lag: NonNegativeInt = 1,
        async_options: AsyncOptions = AsyncOptions(),  # noqa: B008 (frozen)
        cross_policy: CrossPolicy | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        environments: Sequence[Any] = environment if isinstance(environment, (list, tuple)) else [environment]
        if not environments:
            raise ConfigurationError("data.environment is an empty list; give at least one environment")
        self.seed = run_seed(seed)
        self.tasks = RunTasks(environments, names, task_settings, weights, curriculum, self.seed)
        self.validation_sampling = validation_sampling or sampling
        self.validation_episodes = validation_episodes
        self._held_out_splits: set[str] = set()
        self.mode, self.max_lag, self.async_options = mode, max_lag, async_options
        player_options = {
            "max_turns": self.tasks.turn_limits(max_turns),
            "step_timeout": step_timeout,
            "retries": retries,
            "workers": workers,
            "processes": processes,
        }
        lag = max_lag if mode == "async" else 0
        if rounds is not None and lag:
            raise ConfigurationError(
                "data.rounds is of data.mode sync, and the mode is async, where no environment delays other episodes; "
                "leave data.rounds out"
            )
        if engine is not None:
            check_instance(Engine, engine, "data.engine", "an engine")
        stale = StaleSnapshots(cross_policy) if cross_policy is not None and cross_policy.share else None
        self.players = Players(self.environments, engine, lag > 0, player_options, stale)
        sizes = self.tasks.group_sizes(group_size)
        plan = GroupPlan(self.tasks.stream, groups, sizes, self.seed, resample_rounds, failed_members, member_rounds)
        saved = EpisodeRetention() if save_episodes is True else save_episodes or None
        self.collection = RolloutCollection(
            self.tasks, self.players, plan, sampling, rounds, lag, self.async_options, saved
        )
        self.stream = TrainingStream(self.collection, passes, minibatches, iterations)

    def algorithm(self) -> Algorithm:
        """Return the algorithm that is trained.

        Raises:
            ConfigurationError: there is no trainer, or its module is not an algorithm.
        """
        if self.trainer is None:
            raise ConfigurationError("the rollout data module has no trainer; pass it to `trainer.fit`")
        module = self.trainer.lightning_module
        if not isinstance(module, Algorithm):
            raise ConfigurationError(f"{type(module).__name__} is not an Algorithm; a rollout needs its policies")
        return module

    def setup(self, stage: str) -> None:
        learner = self.players.learner = self.algorithm()
        trainer, stream = learner.trainer, self.stream
        # An epoch that ends within an update steps the optimizer early: the number of updates on a rollout then varies.
        steps_early = self._batches(trainer) % trainer.accumulate_grad_batches
        self.check(learner, trainer, stage)
        facts = RolloutFacts(
            # Each once, in order.
            agents=dict.fromkeys(agent for environment in self.environments.values() for agent in environment.agents),
            environments=list(self.environments),
            engine=self.players.configured_engine,
            updates=None if steps_early else stream.passes * stream.minibatches,
        )
        learner.check_rollouts(facts)
        if stage == "fit":
            if getattr(self.collection, "learner", learner) is not learner:
                stream.restart()
            if self.players.stale is not None:
                self.players.stale.check(learner, trainer, self.sampling)
            self.collection.begin(learner)

    def _resample(self, value: Sampling) -> None:
        sampling = as_settings(Sampling, value, "data.sampling")
        if self.collection.collector is not None:
            learner = self.algorithm()
            sampling.check_policies([*learner.policies], "data.sampling")
            checks.check_lag(learner, self.mode, self.max_lag, self.async_options, sampling)
            checks.check_sampling(learner, sampling)
            if self.players.stale is not None:
                self.players.stale.check(learner, learner.trainer, sampling)
        self.collection.resample(sampling)

    def _keep_environments(self, value: object) -> None:
        raise ConfigurationError(
            "data.environments cannot change once the data module is made; give them to the constructor, or end the "
            "run and resume it with another `--data.environment`; attributes of an environment can be assigned"
        )

    environments: Mapping[str, Environment] = cast(
        Any, property(lambda self: MappingProxyType(self.tasks.environments), _keep_environments)
    )
    sampling: Sampling = cast(Any, property(lambda self: self.collection.sampling, _resample))
    """Sampling settings of training episodes; a value that is set holds from the next rollout on."""

    def _batches(self, trainer: Trainer) -> int:
        """Return the number of micro-batches in an epoch of the trainer."""
        stream, limit = self.stream, trainer.limit_train_batches
        length = stream.iterations * stream.passes * stream.minibatches * trainer.accumulate_grad_batches
        return min(limit, length) if isinstance(limit, int) else int(limit * length)

    def check(self, learner: Algorithm, trainer: Trainer, stage: str = "fit") -> None:
        """Validate the options against an algorithm and a trainer.

        Raises:
            ConfigurationError: the algorithm cannot play, or in a ``fit`` train on, these rollouts; the message names
                the option.
        """
        windows = {name: learner.policy(name).context_window for name in learner.policies}
        for option, settings in {"sampling": self.sampling, "validation_sampling": self.validation_sampling}.items():
            settings.check_policies([*learner.policies], f"data.{option}")
            if option == "sampling" or settings != self.sampling:
                rank_zero_only(settings.warn_of_windows)(windows, f"data.{option}")
        plan, stream, engine = self.collection.plan, self.stream, self.players.configured_engine
        if engine is not None:
            check_servers(engine, [name for name in learner.policies if learner.policy(name).trained])
        if stage != "fit":
            return
        ranks = data_parallel_rank(trainer)[1]
        accumulation = int(trainer.accumulate_grad_batches)
        checks.check_learns(learner)
        checks.check_groups(learner, plan, self.tasks.settings)
        checks.check_updates(learner, stream.passes, stream.minibatches, plan.groups, ranks, accumulation)
        checks.check_validation_interval(trainer, self._batches(trainer))
        checks.check_lag(learner, self.mode, self.max_lag, self.async_options, self.sampling)
        checks.check_sampling(learner, self.sampling)
        check_engine = partial(checks.check_logprobs, learner)
        if engine is not None:  # again with its first weights: a pool knows its workers' engine only then
            check_engine(engine)
            self.players.check_engine = check_engine

    def train_dataloader(self) -> TrainingStream:
        self.algorithm()  # raises without a trainer
        return self.stream

    def val_dataloader(self) -> EvaluationStream:
        return self._held_out("validation")

    def test_dataloader(self) -> EvaluationStream:
        return self._held_out("test")

    predict_dataloader = test_dataloader

    def _held_out(self, split: str) -> EvaluationStream:
        self.algorithm()  # raises without a trainer
        episodes = self.validation_episodes or 256
        stream = EvaluationStream(self.players, split, episodes, self.validation_sampling, self.seed)
        if self.validation_episodes and split not in self._held_out_splits:  # Lightning may ask for a loader again
            self._held_out_splits.add(split)
            stream.warn_of_few_tasks("data.validation_episodes")
        return stream

    def teardown(self, stage: str) -> None:
        self.collection.close()

    def on_exception(self, exception: BaseException) -> None:
        self.collection.close()

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state() | self.collection.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.algorithm().trainer.state.fn == "fit":  # the other loops collect nothing
            self.collection.load(state_dict)
            self.stream.load(state_dict)

    def evaluate(
        self, environment: str, *, split: str, episodes: int, sampling: Sampling | None = None
    ) -> EvaluationReport:
        """Return the report of the current weights on tasks of a split; see :mod:`mrlm_pl.evaluation.summary`.

        The ranks divide the episodes, so every rank must call it; all get the report on all of them.
        """
        evaluated = self.environments[environment]
        specs = evaluation_specs(evaluated, episodes, split, self.seed, name=environment)
        played = self.play(specs, sampling or self.validation_sampling)
        chosen: dict[str, Any] = {"environment": environment, "model": "", "split": split, "seed": self.seed}
        return summarize(played, **chosen, requested=episodes, bounds=evaluated.bounds)

    def play(self, specs: Sequence[EpisodeSpec], sampling: Sampling) -> list[Episode]:
        """Return episodes that the current weights played, in order; every rank must call it, and plays some."""
        trainer = self.algorithm().trainer
        rank, ranks = data_parallel_rank(trainer)
        played: list[Any] = [None] * len(specs)
        for number, rank_episodes in enumerate(gather_ranks(trainer, self.players.play(specs[rank::ranks], sampling))):
            played[number::ranks] = rank_episodes
        return played


def rollouts_of(trainer: Any, owner: str, remedy: str = "use a RolloutDataModule") -> RolloutDataModule:
    """Return the rollout data module of a trainer.

    Args:
        trainer: Lightning's trainer.
        owner: name of the callback that plays episodes, for messages.
        remedy: end of the message.

    Raises:
        ConfigurationError: the trainer has another data module.
    """
    data = trainer.datamodule
    if not isinstance(data, RolloutDataModule):
        raise ConfigurationError(f"{owner} plays episodes; {type(data).__name__} has no environment: {remedy}")
    return data
