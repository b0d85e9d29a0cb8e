"""Episodes that a loop without training plays: predictions in files, validations and tests in reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from mrlm_pl.data import RolloutDataModule
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.evaluation.report import EvaluationReport, summarize
from mrlm_pl.learner.ranks import each_share


class PlayedEpisodes(Callback):
    """Writes predicted episodes to ``RUN/episodes``, and keeps reports of those of a validation or test.

    Attributes:
        reports: of each environment that the last loop outside of ``fit`` played.
    """

    def __init__(self) -> None:
        self.reports: list[EvaluationReport] = []
        self._played: list[Episode] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *loader: int
    ) -> None:
        """Write the episodes of a batch."""
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        name = f"predict-{loader[0] if loader else 0}-{batch_idx:06d}{rank}.jsonl.gz"
        write_episodes(Path(trainer.default_root_dir) / "episodes" / name, outputs)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep the episodes of a batch."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._played += getattr(batch, "episodes", ())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the reports, on all ranks of all episodes."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.state.fn == TrainerFn.FITTING or not isinstance(data, RolloutDataModule):
            return
        own, self._played = self._played, []
        played = [episode for share in each_share(trainer, own) for episode in share]
        policies: Any = getattr(pl_module, "policies", {})
        model = ", ".join(str(policy.name_or_path) for policy in policies.values())
        split = "test" if trainer.state.fn == TrainerFn.TESTING else "validation"
        about: dict[str, Any] = {"model": model, "split": split, "seed": data.seed}
        self.reports = [
            summarize([item for item in played if item.task.environment == name], environment=name, **about)
            for name in data.environments
        ]

    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
