"""Count a trainer's training batches and updates, past and total, and let callbacks act after validations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

_ACTS_AT = {EarlyStopping: "_check_on_train_epoch_end", ModelCheckpoint: "_save_on_train_epoch_end"}
"""Lightning's attribute for whether a callback acts at the end of an epoch; None if the user leaves it open."""


def batches_served(trainer: Trainer) -> int:
    """Return the number of past training batches, in all epochs and before a resume."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def batches_in_all(trainer: Trainer) -> float:
    """Return the total number of training batches by ``max_epochs`` and ``max_steps``; infinite without either."""
    bounds = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    if trainer.max_steps >= 0:
        served, accumulation = batches_served(trainer), trainer.accumulate_grad_batches
        # Past updates may have had different numbers of batches.
        bounds.append(served - served % accumulation + (trainer.max_steps - trainer.global_step) * accumulation)
    return min(bounds)


def updates_served(trainer: Trainer) -> int:
    """Return the number of updates of the past batches, as if these settings had held from the start."""
    length, accumulation = trainer.num_training_batches, trainer.accumulate_grad_batches
    if math.isinf(length) or not length:
        return trainer.global_step
    epochs, rest = divmod(batches_served(trainer), int(length))
    return epochs * math.ceil(length / accumulation) + rest // accumulation


def updates_in_all(trainer: Trainer) -> float:
    """Return the number of updates up to the end of a run, as if these settings had held from the start."""
    nominal, length = trainer.estimated_stepping_batches, trainer.num_training_batches
    if trainer.max_steps < 0:
        return nominal
    updates = updates_served(trainer) + trainer.max_steps - trainer.global_step
    if trainer.max_epochs is None or trainer.max_epochs < 0 or math.isinf(length) or not length:
        return updates
    return min(updates, max(trainer.max_epochs, 1) * math.ceil(length / trainer.accumulate_grad_batches))


class ActAfterValidations(Callback):
    """Lets callbacks that monitor a metric act after each validation, for ``val_check_interval`` 1 or a time.

    Lightning reads 1 as 1.0, one epoch, and the callbacks would then see only the last metric of an epoch.

    Args:
        callbacks: callbacks of the trainer; those whose settings say when they act keep to it.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        monitors = (callback for callback in callbacks if getattr(callback, "monitor", None))
        candidates = (
            (callback, name) for callback in monitors for kind, name in _ACTS_AT.items() if isinstance(callback, kind)
        )
        # Before Lightning decides in ``setup``, when it does not know whether there are validations.
        self._undecided = [(callback, name) for callback, name in candidates if getattr(callback, name) is None]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let them act after validations if there are any."""
        if any(trainer.num_val_batches):
            self._decide(False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the decision to their next trainer, which may have no validations."""
        self._decide(None)

    def _decide(self, at_epoch_end: bool | None) -> None:
        for callback, name in self._undecided:
            setattr(callback, name, at_epoch_end)
