"""Evaluate on held-out tasks before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from mrlm_pl.data import RolloutDataModule
from mrlm_pl.durable_files import write_json
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import SPLITS
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.intervals import with_interval
from mrlm_pl.evaluation.report import EvaluationReport, played_episodes
from mrlm_pl.runs.records.run import recorded_settings
from mrlm_pl.settings import at_least, one_of


class HeldOutEvaluation(Callback):
    """Plays held-out tasks of every environment before the first and after the last step.

    Prints mean reward and accuracy with their 95 % intervals, and writes both reports, transcripts included, to
    ``RUN/evaluation_before.json`` and ``RUN/evaluation_after.json``. A resumed run keeps the report it began with.

    Args:
        episodes: episodes of each environment.
        split: split of the tasks.
        sampling: how they are sampled; None is the data module's ``validation_sampling``.
    """

    def __init__(self, episodes: int = 256, split: str = "test", sampling: Sampling | None = None) -> None:
        at_least(1, "HeldOutEvaluation.", episodes=episodes)
        one_of(SPLITS, "HeldOutEvaluation.", split=split)
        self.episodes, self.split, self.sampling = episodes, split, sampling

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        due = not self._file(trainer, "before").is_file() or trainer.global_step == 0
        if trainer.strategy.broadcast(due):  # all ranks play, or none: not all of them may see the file
            self._evaluate(trainer, "before")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluate(trainer, "after")

    def _evaluate(self, trainer: Trainer, moment: str) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, RolloutDataModule):
            raise ConfigurationError(f"HeldOutEvaluation plays episodes; {type(data).__name__} has no environment")
        reports = {
            name: data.evaluate(name, split=self.split, episodes=self.episodes, sampling=self.sampling, model=moment)
            for name in data.environments
        }
        if not trainer.is_global_zero:
            return
        settings = recorded_settings(Path(trainer.default_root_dir))
        written = {name: {**report.to_dict(), "settings": settings.get(name)} for name, report in reports.items()}
        write_json(self._file(trainer, moment), written)
        self._print(moment, reports)

    def _file(self, trainer: Trainer, moment: str) -> Path:
        return Path(trainer.default_root_dir) / f"evaluation_{moment}.json"

    def _print(self, moment: str, reports: dict[str, EvaluationReport]) -> None:
        table = Table(title=f"held-out evaluation {moment} training ({self.split} split)")
        for column in ("environment", "episodes", "mean reward [95 % interval]", "accuracy [95 % interval]"):
            table.add_column(column)
        for name, report in reports.items():
            table.add_row(
                name,
                played_episodes(report),
                with_interval(report.mean_reward, report.ci95),
                with_interval(report.accuracy, report.accuracy_ci95),
            )
        Console(width=100).print(table)
