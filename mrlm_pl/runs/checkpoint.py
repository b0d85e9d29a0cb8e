"""Durable checkpoints in the run folder."""

from __future__ import annotations

import re
import time
import zipfile
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ROLLOUT_ERRORS, ConfigurationError, StorageError
from mrlm_pl.runs.folder import LAST_CHECKPOINT
from mrlm_pl.settings import NonNegativeFloat, check_arguments
from mrlm_pl.trainer.resume import check_checkpoint
from mrlm_pl.trainer.termination import ends_where_others_do, inside_update

_FIRST_MINUTES, _MINUTES = 0.25, 10.0
"""The first interval between two saves by default, and the longest."""

_SAVE_TIMES = 20
"""Least interval in durations of a save: early saves must not slow a large model down."""

_REMOTE = re.compile(r"^\w+://")


def _damage(path: str | Path) -> str | None:
    """Return the damage of a checkpoint by its checksums, which torch does not compare; None without any."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            has_checksums = any(record.CRC for record in archive.infolist())  # torch can leave them out
            record = archive.testzip() if has_checksums else None
    except Exception as error:  # of many classes
        return f"{type(error).__name__}: {error}"
    return None if record is None else f"its record {record!r} has another checksum"


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its final name, forces it to the disk and then renames it: a kill leaves it whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write or replace a checkpoint; a draft that an earlier kill left behind is replaced as well."""
        if _REMOTE.match(str(path)):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with replacing(path, durable=True) as draft, draft.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # Torch ends the archive that it cannot write with its own error.
            reason = error if isinstance(error, OSError) else error.__context__
            if not isinstance(reason, OSError):
                raise
            fault = f"the checkpoint {str(path)!r} cannot be written: {reason.strerror or reason}"
            kept = "the one before is kept; " if Path(path).exists() else ""
            raise StorageError(f"{fault}; {kept}free space on the disk, then resume the run") from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; unless it is asked for, no code of the file runs, from wherever it comes.

        Raises:
            ConfigurationError: the file is damaged, or holds something else.
        """
        if (damage := _damage(path)) is not None:
            raise ConfigurationError(
                f"ckpt_path: {str(path)!r} is damaged: {damage}; restore the file from a copy, or name another"
            )
        # The base class unpickles everything that comes from a URL.
        checkpoint = super().load_checkpoint(path, map_location, weights_only is not False)
        check_checkpoint(checkpoint, path)
        return checkpoint


def continue_best(callbacks: Iterable[Callback], resumed: Path, states: dict[str, dict[str, Any]]) -> None:
    """Let each ``ModelCheckpoint`` in the folder of a resumed run keep the files that an uninterrupted run would.

    Otherwise it would write ``best-v1.ckpt`` from then on, beside an outdated ``best.ckpt``, if the run was killed
    after its first ``best.ckpt`` or its folder has another path now.

    Args:
        callbacks: callbacks of the trainer.
        resumed: checkpoint that is resumed, beside the files.
        states: states of the callbacks in that checkpoint; paths in them become those of the folder.
    """
    run = resumed.parent.parent.resolve()
    since = resumed.stat().st_mtime_ns
    savers = {
        callback: Path(callback.dirpath)
        for callback in callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath
    }
    savers = {callback: folder for callback, folder in savers.items() if run in folder.resolve().parents}
    files = {path for folder in savers.values() for path in folder.rglob("*") if path != resumed}
    later = {path for path in files if path.stat().st_mtime_ns >= since}

    def file_exists(callback: ModelCheckpoint, path: str | Path, trainer: Trainer) -> bool:
        repeated = trainer.strategy.broadcast(Path(path) in later)
        later.discard(Path(path))  # it is written now, and may be a checkpoint of another callback next
        return not repeated and ModelCheckpoint.file_exists(callback, path, trainer)

    for callback, folder in savers.items():
        vars(callback)["file_exists"] = partial(file_exists, callback)
        state = states.get(callback.state_key)
        if state and Path(state["dirpath"]).name == folder.name:
            in_folder = partial(_move_path, state["dirpath"], str(folder))
            state["best_k_models"] = {in_folder(path): score for path, score in state["best_k_models"].items()}
            for key in ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path"):
                state[key] = in_folder(state[key])
            later -= {Path(path) for path in (*state["best_k_models"], state["best_model_path"])}


def _move_path(before: str, now: str, path: str) -> str:
    """Return a path in the folder ``now`` that was in ``before``; a metric in a file's name may make folders."""
    return path.replace(before, now, 1) if path.startswith(before) else path


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``RUN/checkpoints/last.ckpt``, from which ``--ckpt_path last`` continues.

    It is saved at the end of each epoch, unless ``every_n_epochs`` is given, and by default after 15 seconds, then at
    intervals that double, or are 20 times as long as a save if that is longer, up to ten minutes. SIGTERM and, in one
    process, a failed rollout save it too. To keep the best checkpoints add a ``ModelCheckpoint`` to
    ``trainer.callbacks``.

    Args:
        every_n_epochs: number of epochs between two saves; an epoch is ``data.iterations`` iterations.
        every_n_train_steps: number of optimizer steps between two saves.
        minutes: time between two saves in minutes.

    Raises:
        ConfigurationError: ``minutes`` is negative or not finite.
    """

    @check_arguments
    def __init__(
        self,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        minutes: NonNegativeFloat | None = None,
    ) -> None:
        unset = every_n_epochs is None and every_n_train_steps is None and minutes is None
        minutes = _FIRST_MINUTES if unset else minutes
        # One file that is replaced: `save_last` would write every checkpoint a second time.
        super().__init__(
            filename=LAST_CHECKPOINT.stem,
            every_n_epochs=every_n_epochs,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=None if minutes is None else timedelta(minutes=minutes),
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._grows = unset
        if every_n_epochs is None:
            self._every_n_epochs = 1  # beside steps or time, which the base class takes for alternatives

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        """Save when it is due: after the last micro-batch of an update; for the last one of an epoch at its end.

        That is after the validation, so that a finished run holds its progress too.
        """
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or trainer.global_step == trainer.max_steps
        if last or inside_update(trainer):
            return
        saved, started = self._last_global_step_saved, time.monotonic()
        super().on_train_batch_end(trainer, *arguments, **options)
        if self._grows and self._last_global_step_saved != saved and self._train_time_interval is not None:
            needed = _SAVE_TIMES * timedelta(seconds=time.monotonic() - started)
            self._train_time_interval = min(timedelta(minutes=_MINUTES), max(2 * self._train_time_interval, needed))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the validation that was all a resumed run had left, which the next resume would play again."""
        validated = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready
        if trainer.fit_loop.is_resuming and validated and not self._should_skip_saving_checkpoint(trainer):
            self._save_checkpoint(trainer, self.format_checkpoint_name({}))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save a checkpoint when SIGTERM or a failed rollout ends the run.

        Checkpoints hold no gradients, so none is saved between the micro-batches of an update.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if isinstance(exception, SIGTERMException):
            saves = ends_where_others_do(trainer)
        else:  # of several processes one may fail alone
            collecting = batches.ready == batches.completed and trainer.world_size == 1
            saves = collecting and isinstance(exception, ROLLOUT_ERRORS)
        unsaved = self._last_global_step_saved != trainer.global_step and not inside_update(trainer)
        if fitting and saves and unsaved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_checkpoint(trainer, self.format_checkpoint_name({}))

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the base class would save a state that compares several files."""
        return {}
