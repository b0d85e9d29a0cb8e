"""How far a trainer goes."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer


def batches_served(trainer: Trainer) -> int:
    """Training batches that a trainer has had, in all its epochs and before it was resumed."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def batches_in_all(trainer: Trainer) -> float:
    """Training batches after which a trainer ends, as far as ``max_epochs`` and ``max_steps`` tell; infinite if not."""
    bounds = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    if trainer.max_steps >= 0:
        bounds.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return min(bounds)
