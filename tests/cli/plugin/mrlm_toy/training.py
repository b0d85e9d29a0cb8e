import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from mrlm_pl.engines.base import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, Task
from mrlm_pl.errors import DataError, NonFiniteError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.policies.reference import ReferencePolicy


@final
class ToyPolicy(torch.nn.Module):
    """Stands in for ``mrlm_pl.policy.Policy``, which reads a model."""

    def __init__(self, model: str = "none", learning_rate: float = 1e-6, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.model, self.learning_rate, self.weight_decay = model, learning_rate, weight_decay


class ToyAlgorithm(Algorithm):
    """Moves one weight.

    Args:
        policies: by name.
        rate: learning rate.
        fail_at: step at which it fails, -1 never.
    """

    loaded = 0

    def __init__(self, policies: dict[str, ToyPolicy] | None = None, rate: float = 0.5, fail_at: int = -1) -> None:
        super(Algorithm, self).__init__()  # the toy has no models to be put in seats
        self.metrics = Metrics(())
        self.reference = ReferencePolicy()
        self.save_hyperparameters()
        self.settings, self.rate, self.fail_at = policies or {}, rate, fail_at
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def configure_model(self) -> None:
        type(self).loaded += 1

    def policy_loss(self, name: str, rows: Any, batch: Any) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            raise NonFiniteError(f"the loss is nan at step {self.global_step}; lower the learning rate")
        self.log("train/weight", self.weight)
        return (self.weight - batch).square()

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure no gradient norm."""

    def end_evaluation(self, prefix: str) -> None:
        """Measure no episodes."""

    configure_gradient_clipping = LightningModule.configure_gradient_clipping

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/weight", self.weight)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[Episode]:
        task = Task("parrot", "test", int(batch))
        return [Episode(f"{self.weight.item()}", task, task.key, 0, -1, {}, "answered")]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass

    def on_train_end(self) -> None:
        folder = Path(self.trainer.default_root_dir)
        state = {"weight": self.weight.item(), "step": self.global_step, "seed": self.trainer.datamodule.seed}
        (folder / f"rank-{self.global_rank}.json").write_text(json.dumps(state))


class _Batches:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(1.0), torch.tensor(3.0)])


class ToyData(LightningDataModule):
    """Two numbers.

    Args:
        environment: not played.
        file: a file that must exist.
        seed: seed of the run.
        sampling: not used.
    """

    def __init__(
        self,
        environment: Environment | list[Environment] | None = None,
        file: str | None = None,
        seed: int = -1,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        if file is not None and not Path(file).is_file():
            raise DataError(f"data.file: there is no file {file!r}; check the path")
        self.environment, self.seed = environment, seed

    def train_dataloader(self) -> _Batches:
        return _Batches()

    def val_dataloader(self) -> _Batches:
        return _Batches()

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader
