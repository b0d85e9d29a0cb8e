"""Episodes that a prediction loop plays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from mrlm_pl.episode_files import write_episodes


class PredictedEpisodes(BasePredictionWriter):
    """Writes the episodes that a prediction loop plays to ``RUN/episodes``."""

    def __init__(self) -> None:
        super().__init__(write_interval="batch")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        name = f"predict-{dataloader_idx}-{batch_idx:06d}{rank}.jsonl.gz"
        write_episodes(Path(trainer.default_root_dir) / "episodes" / name, prediction)
