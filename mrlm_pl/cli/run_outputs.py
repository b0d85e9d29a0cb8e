"""What a run leaves in its folder unless told otherwise: metrics, the last checkpoint and the configuration."""

from __future__ import annotations

import csv
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from transformers.utils.logging import disable_progress_bar

from mrlm_pl.cli.run_folder import LAST_CHECKPOINT, TENSORBOARD
from mrlm_pl.data import write_episodes
from mrlm_pl.data.termination import ends_where_others_do, inside_update
from mrlm_pl.errors import StorageError
from mrlm_pl.whole_files import replacing

_MINUTES = 10.0
_REMOTE = re.compile(r"^\w+://")
_NOISE = (
    r"^Seed set to",
    r"^TPU available: False",
    r"^Trainer already configured with model summary callbacks",
    r"litlogger",
    r"litmodels",
    r"does not have many workers",
    r"Couldn't infer the batch indices",
    r"isinstance\(treespec, LeafSpec\)",
    r"Total length of `list` across ranks is zero",  # there is no validation data
    r"your dataloader is not resumable",  # the position in the stream is in the data module
    r"module\(s\) in eval mode",
    r"recommended to use `self\.log\('(val|test)/",  # they are of all ranks already
    r"Checkpoint directory .* exists and is not empty",
)


class MetricsFile(Logger):
    """Writes all numbers to ``RUN/metrics.csv``, one row for each call, and goes on with the file of a resumed run.

    Rows of the earlier part at steps that the resumed run repeats are dropped, so that every step is told once.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] = []
        self._started = False

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``RUN/config.yaml`` holds all of them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": step or 0, **metrics}
        rows = [] if self._started else self._earlier_rows(row["step"])
        new = [name for name in sorted(row) if name not in self._columns]
        if new or not self._started:
            if self._started:
                rows = self._read()
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            self._rewrite(rows)
            self._started = True
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _read(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _earlier_rows(self, step: int) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        # A row that a kill has cut short lacks its step or its last columns.
        rows = [row for row in self._read() if (row.get("step") or "").isdigit() and None not in row.values()]
        rows = [row for row in rows if int(row["step"]) < step]
        self._columns = list(rows[0]) if rows else []
        return rows

    def _rewrite(self, rows: Sequence[dict[str, str]]) -> None:
        with replacing(self.path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final name, forces it to the disk and then renames it: a kill leaves it whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write or replace a checkpoint; a draft that an earlier kill left behind is replaced as well."""
        if _REMOTE.match(str(path)):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with replacing(path, durable=True) as draft, draft.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # Torch ends the archive that it cannot write with an error of its own.
            reason = error if isinstance(error, OSError) else error.__context__
            if not isinstance(reason, OSError):
                raise
            raise StorageError(
                f"the checkpoint {str(path)!r} cannot be written: {reason.strerror or reason}; the one before is kept; "
                "free space on the disk, then resume the run"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; unless it is asked for, no code of the file runs, from wherever it comes."""
        # The base class unpickles everything that comes from a URL.
        return super().load_checkpoint(path, map_location, weights_only is not False)


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``RUN/checkpoints/last.ckpt``, from which ``--ckpt_path last`` continues.

    When nothing is set it is saved every ten minutes and at the end of each epoch; it is also saved when SIGTERM ends
    the run. To keep the best checkpoints too, add a ``ModelCheckpoint`` to ``trainer.callbacks``.

    Args:
        every_n_epochs: epochs between two saves; an epoch is ``data.iterations`` collections.
        every_n_train_steps: optimizer steps between two saves.
        minutes: time between two saves.
    """

    def __init__(
        self,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        minutes: float | None = None,
    ) -> None:
        unset = every_n_epochs is None and every_n_train_steps is None and minutes is None
        minutes = _MINUTES if unset else minutes
        # One file that is replaced: `save_last` would write every checkpoint a second time.
        super().__init__(
            filename=LAST_CHECKPOINT.stem,
            every_n_epochs=every_n_epochs,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=None if minutes is None else timedelta(minutes=minutes),
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        if unset:
            self._every_n_epochs = 1  # beside the time, which the base class takes for an alternative

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        """Save when it is due; between the pieces of an update, after its last one."""
        if not inside_update(trainer):
            super().on_train_batch_end(trainer, *arguments, **options)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what there is when SIGTERM ends the run.

        Gradients are in no checkpoint, so that there is none between the pieces of an update.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        ended = isinstance(exception, SIGTERMException) and fitting and ends_where_others_do(trainer)
        unsaved = self._last_global_step_saved != trainer.global_step and not inside_update(trainer)
        if ended and unsaved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_checkpoint(trainer, self.format_checkpoint_name({}))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what the base class keeps tells which of several files is the best."""
        return {}


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


class SaveConfig(SaveConfigCallback):
    """Saves the configuration as ``config.yaml`` in the run folder, and that of a continuation as ``config-2.yaml``."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / "config.yaml", 1
        while path.exists():
            number += 1
            path = folder / f"config-{number}.yaml"
        with replacing(path) as draft:
            self.parser.save(self.config, str(draft), skip_unset=False, multifile=False, overwrite=True)
        hyperparameters = without_paths(self.config.as_dict())
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the files that it was read from, as loggers take it.

    >>> without_paths({"config": ["a.yaml"], "seed_everything": 0})
    {'seed_everything': 0}
    """
    return {name: value for name, value in config.items() if name != "config"}


def default_loggers(folder: str) -> list[Logger]:
    """TensorBoard in ``RUN/tensorboard`` and ``RUN/metrics.csv``."""
    tensorboard = TensorBoardLogger(folder, name=TENSORBOARD, version="", default_hp_metric=False)
    return [tensorboard, MetricsFile(folder)]


def place_checkpoints(callbacks: list[Callback], folder: str) -> None:
    """Let checkpoint callbacks without a folder of their own write to ``RUN/checkpoints``.

    :class:`LastCheckpoint` is taken out where another callback keeps the last checkpoint.
    """
    theirs = [item for item in callbacks if isinstance(item, ModelCheckpoint) and not isinstance(item, LastCheckpoint)]
    if any(item.save_last for item in theirs):
        callbacks[:] = [item for item in callbacks if not isinstance(item, LastCheckpoint)]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(Path(folder) / LAST_CHECKPOINT.parent)


def silence_noise() -> None:
    """Drop messages that advertise or do not concern a run of ours, and bars for reading and writing weights."""
    disable_progress_bar()
    for text in _NOISE:
        warnings.filterwarnings("ignore", message=f".*{text}")
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
    ):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _NoNoise) for item in logger.filters):
            logger.addFilter(_NoNoise())


class _NoNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(re.search(text, record.getMessage()) for text in _NOISE)
