"""A callback that keeps what a run logs."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class Watch(Callback):
    """Keeps the numbers of each update, and the gradients of the first.

    Attributes:
        steps: the metrics of each update, by name.
        gradients: gradients of the first update, by the name of the weight.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, algorithm: Any, optimizer: Any) -> None:
        if not self.gradients:
            named = algorithm.named_parameters()
            self.gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}

    def on_train_batch_end(self, trainer: Any, algorithm: Any, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
