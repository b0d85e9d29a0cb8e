"""Numbers of training batches of a trainer: past ones, all, and those between validations."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint


def batches_served(trainer: Trainer) -> int:
    """Return the number of past training batches, in all epochs and before a resume."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def batches_in_all(trainer: Trainer) -> float:
    """Return the number of training batches by ``max_epochs`` and ``max_steps``; infinite without either."""
    bounds = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    if trainer.max_steps >= 0:
        bounds.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return min(bounds)


def act_after_validations(trainer: Trainer) -> None:
    """Let callbacks that monitor a metric act after each validation, also with ``val_check_interval`` 1.

    Lightning takes this number of batches for 1.0, one epoch, at whose end they would look at the last metric only.
    """
    interval = trainer.val_check_interval
    if interval != 1 or not isinstance(interval, int) or not trainer.limit_val_batches:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end is None:
            callback._check_on_train_epoch_end = False
        if isinstance(callback, ModelCheckpoint) and callback.monitor and callback._save_on_train_epoch_end is None:
            callback._save_on_train_epoch_end = False
