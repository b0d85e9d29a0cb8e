"""Numbers of training batches of a trainer."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer


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
