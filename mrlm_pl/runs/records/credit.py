"""Recorded episodes under the credit of another algorithm or setting, without play."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from mrlm_pl.data.rollout.tasks import TaskSettings, scaled
from mrlm_pl.durable_files import replacing, write_json
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, is_tree_path
from mrlm_pl.episode_files import episode_files, iteration_file, not_kept, read_episodes, write_episodes
from mrlm_pl.errors import ConfigurationError, writing
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.credit.records import credited, without_credit
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.runs.records.credit_report import Comparison, RecreditReport
from mrlm_pl.runs.records.gradients import Gradients
from mrlm_pl.runs.records.run import (
    latest_configuration,
    read_run,
    recorded_configuration,
    recorded_iterations,
    recorded_settings,
)
from mrlm_pl.runs.seated_model import loaded_policies, sampling_from
from mrlm_pl.settings import as_settings

logger = logging.getLogger(__name__)


def recredit(
    run: str | Path,
    algorithm: Algorithm,
    *,
    iteration: int | None = None,
    output: str | Path | None = None,
    policies: str | Path | None = None,
    device: str = "auto",
    sampling: Sampling | None = None,
    task_settings: Mapping[str, TaskSettings | Mapping[str, Any]] | None = None,
) -> RecreditReport:
    """Compute the advantages of recorded episodes with an algorithm's own credit, and compare them with the record.

    No environment is read, and weights only for the gradients of ``policies``. With the run's own settings, the
    advantages are the recorded ones. The algorithm's trainer and progress stay as they are.

    Args:
        run: run folder.
        algorithm: algorithm whose credit is computed; its policies and seats are those of the run.
        iteration: iteration whose episodes are credited; None credits all.
        output: folder for the episodes with their new advantages and ``recredit.json``; None writes no files.
        policies: run folder, model folder or hub id with weights, to compare the gradients under both credits; None
            compares the advantages alone. See :class:`~mrlm_pl.runs.records.gradients.Gradients`.
        device: device of the weights, as torch names it; ``auto`` prefers an accelerator.
        sampling: sampling settings of the run, for ``overlong_buffer``; None takes those of its configuration.
        task_settings: settings of the run's environments, for ``reward_scale``; None takes those of its configuration.

    Raises:
        ConfigurationError: the credit needs weights, other episodes or settings that the run does not record, or the
            output exists, is inside the run or cannot be written.
        DataError: the episodes cannot be read.
    """
    folder = Path(run)
    learner = _check_algorithm(algorithm)
    output_folder = None if output is None else Path(output)
    if output_folder is not None and (output_folder.exists() or folder.resolve() in output_folder.resolve().parents):
        fault = "exists" if output_folder.exists() else f"is inside the run {str(folder)!r}"
        raise ConfigurationError(f"output: {str(output_folder)!r} {fault}; name a new folder outside the run")
    with _restoring_progress(learner):
        crediting = _Crediting(folder, learner, iteration, sampling, task_settings)
        gradients = None
        if policies is not None:
            loaded = loaded_policies(read_run(str(policies)).policies, device)
            gradients = Gradients(loaded, {name: crediting.sampling.of(name).temperature or 1.0 for name in loaded})
        if output_folder is None:
            return _compare(crediting, gradients, None)
        with writing("output", output_folder), replacing(output_folder) as draft:
            draft.mkdir()
            report = _compare(crediting, gradients, draft)
            write_json(draft / "recredit.json", {"run": str(folder), **asdict(report)})
        return report


def _compare(crediting: _Crediting, gradients: Gradients | None, draft: Path | None) -> RecreditReport:
    """Return the report on the new credit of a run; write its episodes to a folder.

    Raises:
        ConfigurationError: no episode has new credit.
    """
    comparison = Comparison()
    for number, recorded, new in crediting.iterations():
        comparison.add(recorded, new)
        if gradients is not None:
            gradients.add(recorded, new)
        if draft is not None:
            write_episodes(iteration_file(draft, number), new)
    report = comparison.report(crediting.name)
    if not report.episodes:
        fault = f"{crediting.name} gives none of the chosen episodes of {str(crediting.folder)!r} credit"
        reason = f"they failed, are excluded, or are fewer than {crediting.learner.smallest_group} of a task"
        raise ConfigurationError(f"model: {fault}: {reason}; choose another algorithm or another iteration")
    if gradients is None:
        return report
    cosine_by_agent = gradients.by_agent()
    agents = {
        name: replace(change, gradient_cosine=cosine_by_agent.get(name)) for name, change in report.agents.items()
    }
    return replace(report, agents=agents, gradient_cosines=gradients.by_policy())


@contextmanager
def _restoring_progress(learner: PolicyGradient) -> Iterator[None]:
    """Within the context the algorithm has no progress and a trainer of one process; afterwards it is as before."""
    progress, attributes = copy.deepcopy(learner.progress()), dict(vars(learner))
    try:
        learner.load_progress({})
        learner.trainer, learner.metrics = _one_process(), Metrics(list(learner.policies), learner)
        yield
    finally:
        vars(learner).update(attributes)
        learner.load_progress(progress)


def _one_process() -> Trainer:
    """Return a trainer of this process alone, also among others of a cluster's job; it prints nothing."""
    notes = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before, notes.disabled = notes.disabled, True
    try:
        return Trainer(accelerator="cpu", devices=1, plugins=LightningEnvironment(), barebones=True)
    finally:
        notes.disabled = before


def _check_algorithm(algorithm: Algorithm) -> PolicyGradient:
    """Return the algorithm, if its credit needs no weights.

    Raises:
        ConfigurationError: the credit needs weights, or the algorithm has no advantages.
    """
    name, advice = type(algorithm).__name__, "choose an algorithm without it, such as GRPO or RLOO"
    if not isinstance(algorithm, PolicyGradient):
        raise ConfigurationError(f"model: {name} gives the turns of episodes no advantage; {advice}")
    if (reason := algorithm.credit_needs_weights_for) is not None:
        raise ConfigurationError(f"model: the credit of {name} needs weights for {reason}; {advice}")
    return algorithm


class _Crediting:
    """Credits a run's iterations, one after the other."""

    def __init__(
        self,
        folder: Path,
        learner: PolicyGradient,
        iteration: int | None,
        sampling: Sampling | None,
        task_settings: Mapping[str, TaskSettings | Mapping[str, Any]] | None,
    ) -> None:
        recorded = read_run(str(folder), weights=False)
        self.folder, self.learner, self.name, self.iteration = folder, learner, type(learner).__name__, iteration
        if latest_configuration(folder) is None:
            if learner.overlong_buffer and sampling is None:
                fault = f"model.overlong_buffer needs the limit on sampling, and {str(folder)!r} has no config.yaml"
                remedy = "give `sampling=` of the run in Python, or set model.overlong_buffer 0"
                raise ConfigurationError(f"{fault}; {remedy}")
            if task_settings is None:
                text = "%s has no config.yaml: rewards have no `reward_scale`; give `task_settings=` if the run had one"
                logger.warning(text, folder)
        self.sampling = sampling or sampling_from(recorded.sampling, {})
        settings = recorded.task_settings if task_settings is None else task_settings
        self.scales = {
            name: as_settings(TaskSettings, values or {}, f"task_settings.{name}").reward_scale
            for name, values in settings.items()
        }
        self.environments = list(recorded_settings(folder))
        trained = recorded_configuration(folder).get("model") or {}
        self.trained_by = str(trained.get("class_path", "")).rpartition(".")[2]
        self.done = 0

    def iterations(self) -> Iterator[tuple[int, list[Episode], list[Episode]]]:
        """Yield the number of each iteration, its episodes and these with new credit, in the order of the files.

        Raises:
            ConfigurationError: there is no iteration, or the credit needs other episodes.
        """
        has_episodes = False
        folder = self.folder / "episodes"
        for number, episodes in itertools.groupby(read_episodes(folder), lambda episode: episode.iteration):
            if number == self.iteration or (self.iteration is None and number >= 0):
                has_episodes = True
                recorded = list(episodes)
                yield number, recorded, self._credit(number, recorded)
        if not has_episodes:
            gone = not_kept(episode_files(folder), recorded_iterations(self.folder))
            scope = "of training" if self.iteration is None else f"of iteration {self.iteration}"
            raise ConfigurationError(f"{str(self.folder)!r} has no episode {scope}{f'; {gone}' if gone else ''}")

    def _credit(self, number: int, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with new credit; those that are not trained on have none.

        Raises:
            ConfigurationError: the credit needs other episodes.
        """
        plain = [without_credit(episode) for episode in episodes]
        included = [episode for episode in plain if episode.excluded is None]
        groups = Counter(episode.group for episode in included if not episode.failed and episode.origin is None)
        training = [
            episode
            for episode in included
            if groups[episode.group] >= self.learner.smallest_group
            and (episode.origin is None or self.learner.unit.branch_rule is not None)
        ]
        greedy = [episode for episode in plain if episode.excluded == "greedy"]
        self._check(training, greedy)
        agents = {*self.learner.seats, *itertools.chain.from_iterable(episode.agents for episode in plain)}
        environments = self.environments or list({episode.task.environment: 0 for episode in plain})
        self.learner.check_rollouts(RolloutFacts(agents, environments))
        scaled_training, greedy = (
            [scaled(episode, self.scales.get(episode.task.environment, 1.0)) for episode in chosen]
            for chosen in (training, greedy)
        )
        batches = self.learner.trained_rows(scaled_training, self.sampling, greedy)
        policy_batches = {name: batches[name] for name in self.learner.policies if name in batches}
        credited_by_id = {episode.id: episode for episode in credited(training, scaled_training, policy_batches)}
        self._check_history(number)
        return [credited_by_id.get(episode.id, episode) for episode in plain]

    def _check(self, training: Sequence[Episode], greedy: Sequence[Episode]) -> None:
        learner, missing = self.learner, ""
        if any(map(is_tree_path, training)) != (learner.unit.branching is not None):
            missing = "turn trees" if learner.unit.branching is not None else "separate episodes instead of turn trees"
        elif learner.unit.branch_rule is not None and (
            self.trained_by != self.name or all(episode.origin is None for episode in training)
        ):
            missing = "the branch episodes of each group that only its own runs play"
            missing += "" if self.trained_by else " (no config.yaml names the run's algorithm)"
        elif learner.uses_greedy_baseline and not greedy:
            missing = "a greedy episode of each task"
        if missing and training:
            fault = f"{self.name} compares with {missing}, which {str(self.folder)!r} does not have"
            raise ConfigurationError(f"model: {fault}; choose another algorithm, or train with this one")
        unknown = {row.policy for episode in training for row in episode.rows()} - {*learner.policies}
        if unknown:
            fault = f"the episodes of {str(self.folder)!r} are of {sorted(unknown)}"
            choices = f"the policies are {sorted(learner.policies)}; give the policies and seats of the run"
            raise ConfigurationError(f"model.policies: {fault}, and {choices}")

    def _check_history(self, number: int) -> None:
        """Reject a baseline of earlier iterations that are not there."""
        history_keys = self.learner.progress().keys() - PolicyGradient.progress(self.learner).keys()
        if number != self.done and any(self.learner.progress()[key] for key in history_keys):
            fault = f"iteration {self.done} is not among the episodes; credit a run that keeps all iterations"
            if self.iteration is not None:
                fault = f"`--iteration {self.iteration}` leaves them out; credit all iterations"
            fault = f"{self.name} compares with earlier iterations, and {fault}"
            raise ConfigurationError(f"model: {fault}, or choose another algorithm")
        self.done += 1
