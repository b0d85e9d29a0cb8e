"""The numbers that Lightning keeps for its loggers."""

from __future__ import annotations

from typing import Any


def take_logged(trainer: Any) -> dict[str, float]:
    """Return the numbers that ``LightningModule.log`` was given for the loggers, which Lightning then does not write.

    Callbacks and the progress bar keep them. Means of an epoch stay with Lightning.
    """
    if not trainer._results:
        return {}
    trainer.callback_metrics, trainer.progress_bar_metrics  # noqa: B018 (read, they take the numbers)
    values = trainer._results.metrics(on_step=True)["log"]
    taken = [item for _, item in trainer._results.valid_items() if item.meta.logger and not item.meta.on_epoch]
    for item in taken:
        item.reset()
    return {item.meta.name: float(values[item.meta.name]) for item in taken}
