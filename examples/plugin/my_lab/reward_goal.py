"""A callback: end the run when the reward reaches a goal."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class RewardGoal(Callback):
    """Stop training after ``patience`` consecutive iterations with a mean reward of at least ``reward``.

    Args:
        reward: goal for ``rollout/reward``.
        patience: number of consecutive iterations.
    """

    def __init__(self, reward: float, patience: int = 2) -> None:
        self.reward, self.patience = reward, patience
        self.reached, self.iteration = 0, -1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop a run again that had reached the goal and is resumed."""
        trainer.should_stop = trainer.should_stop or self.reached >= self.patience

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the reward once per iteration."""
        metrics = trainer.callback_metrics
        iteration = float(metrics["progress/iteration"])
        if iteration == self.iteration:
            return
        self.iteration = iteration
        self.reached = self.reached + 1 if float(metrics["rollout/reward"]) >= self.reward else 0
        if self.reached == self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, so that a resumed run stops like an uninterrupted one."""
        return {"reached": self.reached, "iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.reached, self.iteration = state_dict["reached"], state_dict["iteration"]
