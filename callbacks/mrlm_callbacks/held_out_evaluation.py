"""Evaluate on held-out tasks before, during and after training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.module import rollouts_of
from mrlm_pl.durable_files import write_json
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import SPLITS, Environment
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.intervals import with_interval
from mrlm_pl.evaluation.report import EvaluationReport, played_episodes
from mrlm_pl.runs.metrics_file import MetricsFile
from mrlm_pl.runs.records.environment_code import code_of
from mrlm_pl.runs.records.run import recorded_settings
from mrlm_pl.settings import PositiveInt, check_arguments, one_of


class HeldOutEvaluation(Callback):
    """Plays held-out tasks of every environment before the first and after the last step.

    Prints mean reward and accuracy with their 95 % intervals, and writes both reports, transcripts included, to
    ``RUN/evaluation_before.json`` and ``RUN/evaluation_after.json``. A resumed run keeps the report it began with.
    All evaluations of a split play the same tasks with the same seeds, and do not change the training. TensorBoard and
    other loggers get ``held_out/ENVIRONMENT/reward`` and ``accuracy``, and those of the curve as ``curve/...``; the
    readers of a run take both from its reports.

    Args:
        episodes: number of episodes of each environment.
        split: split of the tasks before and after the training.
        sampling: sampling settings; None is the data module's ``validation_sampling``, for files the default.
        every: optimizer steps between two points of a curve on the split ``validation``, by which a run may be stopped
            or a checkpoint chosen; ``RUN/evaluation_curve.json`` then has means and intervals by step, from before the
            first step to after the last. None has no curve.
        environment: environment to play for a policy that is trained on files, which have none.

    Raises:
        ConfigurationError: a number is below 1, the split does not exist, or the data module has environments and
            ``environment`` is given, or has none and it is not.
    """

    @check_arguments
    def __init__(
        self,
        episodes: PositiveInt = 256,
        split: str = "test",
        sampling: Sampling | None = None,
        every: PositiveInt | None = None,
        environment: Environment | None = None,
    ) -> None:
        one_of(SPLITS, "HeldOutEvaluation.", split=split)
        self.episodes, self.split, self.sampling, self.every = episodes, split, sampling, every
        self.environment = environment
        self._data: RolloutDataModule | None = None  # of the environment
        self._reports: dict[tuple[int, str], dict[str, EvaluationReport]] = {}  # by step and split; of the latest step
        self._evaluated = -1  # step of the latest point, also before a resume

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        due = not self._file(trainer, "before").is_file() or trainer.global_step == 0
        if trainer.strategy.broadcast(due):  # all ranks play, or none: not all of them may see the file
            self._write_report(trainer, "before")
        self.on_train_batch_end(trainer)  # the first, or one of an evaluation in which a signal has ended the run

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.every and trainer.global_step % self.every == 0:
            self._add_point(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every:
            self._add_point(trainer)
        self._write_report(trainer, "after")

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated": self._evaluated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._evaluated = state_dict["evaluated"]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._data is not None:
            self._data.teardown("validate")
        self._data, self._reports = None, {}

    def _rollouts(self, trainer: Trainer) -> RolloutDataModule:
        """Return the data module that plays: the run's, or, when training on files, one for the environment."""
        if self.environment is None:
            return rollouts_of(trainer, "HeldOutEvaluation", "name one with HeldOutEvaluation.environment")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, RolloutDataModule):
            raise ConfigurationError(
                "HeldOutEvaluation.environment is for training on files; a RolloutDataModule has environments, "
                "which are evaluated: leave it out"
            )
        if self._data is None:
            self._data = RolloutDataModule(self.environment, sampling=self.sampling or Sampling(), seed=data.seed)
            self._data.trainer = trainer
            self._data.setup("validate")
        return self._data

    def _evaluate(self, trainer: Trainer, split: str) -> dict[str, EvaluationReport]:
        """Return the reports of the current weights on a split by environment; those of a step are played once."""
        key = trainer.global_step, split
        if key not in self._reports:
            data = self._rollouts(trainer)
            reports = {
                name: data.evaluate(name, split=split, episodes=self.episodes, sampling=self.sampling)
                for name in data.environments
            }
            self._reports = {known: value for known, value in self._reports.items() if known[0] == key[0]}
            self._reports[key] = reports
        return self._reports[key]

    def _log(self, trainer: Trainer, prefix: str, reports: dict[str, EvaluationReport]) -> None:
        """Log means at the step of the update before them, whose other metrics a resumed run keeps; -1 before all."""
        played = {name: report for name, report in reports.items() if report.episodes}
        means = {f"{prefix}/{name}/reward": report.mean_reward for name, report in played.items()}
        accuracies = {f"{prefix}/{name}/accuracy": report.accuracy for name, report in played.items()}
        means |= {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
        for logger in trainer.loggers:
            if not isinstance(logger, MetricsFile):  # which has one row for each update
                logger.log_metrics(means, trainer.global_step - 1)

    def _add_point(self, trainer: Trainer) -> None:
        """Evaluate on the validation split, and add the means to the curve, once a step."""
        file, step = self._file(trainer, "curve"), trainer.global_step
        if step == self._evaluated:
            return
        reports = self._evaluate(trainer, "validation")
        self._evaluated = step
        if not trainer.is_global_zero:
            return
        self._log(trainer, "curve", reports)
        points = json.loads(file.read_text(encoding="utf-8"))["points"] if file.is_file() else []
        numbers = ("episodes", "mean_reward", "ci95", "accuracy", "accuracy_ci95")
        by_environment = {name: {key: report.to_dict()[key] for key in numbers} for name, report in reports.items()}
        # A run that is begun again, or resumed from an earlier step, repeats the later points.
        earlier = [point for point in points if point["step"] < step]
        write_json(file, {"points": [*earlier, {"step": step, "environments": by_environment}]})

    def _write_report(self, trainer: Trainer, moment: str) -> None:
        evaluated = self._evaluate(trainer, self.split)
        reports = {name: replace(report, model=moment) for name, report in evaluated.items()}
        if not trainer.is_global_zero:
            return
        self._log(trainer, "held_out", reports)
        settings, environments = recorded_settings(Path(trainer.default_root_dir)), self._rollouts(trainer).environments
        records = {
            name: {**report.to_dict(), "settings": settings.get(name), "code": code_of(environments[name])}
            for name, report in reports.items()
        }
        write_json(self._file(trainer, moment), records)
        self._print(moment, reports)

    def _file(self, trainer: Trainer, moment: str) -> Path:
        return Path(trainer.default_root_dir) / f"evaluation_{moment}.json"

    def _print(self, moment: str, reports: dict[str, EvaluationReport]) -> None:
        table = Table(title=f"held-out evaluation {moment} training ({self.split} split, with 95 % intervals)")
        for column in ("environment", "episodes", "mean reward", "accuracy"):
            table.add_column(column)
        for name, report in reports.items():
            table.add_row(
                name,
                played_episodes(report),
                with_interval(report.mean_reward, report.ci95),
                with_interval(report.accuracy, report.accuracy_ci95),
            )
        console = Console()
        console.width = console.width if console.is_terminal else 100
        with console.capture() as shown:
            console.print(table)
        print(shown.get(), end="")  # above a live display, which a separate console would print into
