"""A callback: end the run when the reward has been high enough for some iterations."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class RewardGoal(Callback):
    """Stop training after ``patience`` iterations in a row whose mean reward reaches ``reward``.

    Args:
        reward: the goal, of ``rollout/reward``.
        patience: iterations in a row.
    """

    def __init__(self, reward: float, patience: int = 2) -> None:
        self.reward, self.patience = reward, patience
        self.reached, self.iteration = 0, -1.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the metrics once an iteration, however many updates it has."""
        metrics = trainer.callback_metrics
        iteration = float(metrics["progress/iteration"])
        if iteration == self.iteration:
            return
        self.iteration = iteration
        self.reached = self.reached + 1 if float(metrics["rollout/reward"]) >= self.reward else 0
        if self.reached == self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run stops where an undisturbed one does."""
        return {"reached": self.reached, "iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.reached, self.iteration = state_dict["reached"], state_dict["iteration"]
