"""A data module over a fixed set of examples: shuffled epochs, an exact position, the same batches on any machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.ranks import data_parallel_rank
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import Policy
from mrlm_pl.seeding import derive_seed

DataSplit = Literal["train", "validation", "test"]


class FixedDataModule(LightningDataModule, ABC):
    """Base of the data modules over files: a subclass says how many examples there are and makes tensors of them.

    The position in an epoch counts examples, so a run may go on with another batch size or number of ranks.

    Args:
        sources: file or hub name of each split; ``train`` is there, None is a split that is not.
        batch_size: examples in a batch, on each rank.
        seed: of the shuffling.

    Raises:
        ConfigurationError: ``batch_size`` is below 1.
    """

    def __init__(self, sources: Mapping[DataSplit, str | None], batch_size: int, seed: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigurationError(f"data.batch_size is {batch_size}; it must be 1 or above")
        self.sources: dict[DataSplit, str] = {split: source for split, source in sources.items() if source}
        self.batch_size, self.seed = batch_size, seed
        self.epoch = 0
        self.position = 0

    @abstractmethod
    def count(self, split: DataSplit) -> int:
        """Number of examples in a split; 0 for one that has no source."""

    @abstractmethod
    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        """The rows of the examples ``chosen``, of which there is at least one, by policy."""

    @abstractmethod
    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        """The size of an update on the examples ``update``, by policy."""

    def before_first_batch(self) -> None:
        """Called when the model is on its device and a checkpoint has been read, before a batch is made."""

    def train_dataloader(self) -> EpochStream:
        return EpochStream(self, "train")

    def val_dataloader(self) -> EpochStream | list[Any]:
        return EpochStream(self, "validation") if self.count("validation") else []

    def test_dataloader(self) -> EpochStream:
        if not self.count("test"):
            raise ConfigurationError("data.test names no file; give one, as in `--data.test held_out.jsonl`")
        return EpochStream(self, "test")

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]

    def algorithm(self) -> Algorithm:
        """The algorithm that is trained.

        Raises:
            ConfigurationError: it is none of this package's.
        """
        trainer: Any = self.trainer
        module = trainer.lightning_module
        if not isinstance(module, Algorithm):
            raise ConfigurationError(f"{type(module).__name__} is not an Algorithm; {type(self).__name__} needs one")
        return module

    def learner(self) -> tuple[str, Policy]:
        """Name and policy that learn from the examples."""
        algorithm = self.algorithm()
        name = next(iter(algorithm.policies))
        return name, algorithm.policy(name)

    def upcoming(self, batches: int, size: int) -> list[list[int]]:
        """The training examples of the next ``batches`` batches of at most ``size``; an epoch's last may be smaller."""
        found = []
        epoch, position = self.epoch, self.position
        for _ in range(batches):
            found.append(self.order(epoch)[position : position + size])
            position += size
            if position >= self.count("train"):
                epoch, position = epoch + 1, 0
        return found

    def advance(self, size: int) -> None:
        """Step over the next training batch of at most ``size`` examples."""
        self.position += size
        if self.position >= self.count("train"):
            self.epoch, self.position = self.epoch + 1, 0

    def order(self, epoch: int) -> list[int]:
        """Numbers of the training examples in the order of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed("shuffle", self.seed, epoch))
        return torch.randperm(self.count("train"), generator=generator).tolist()


class EpochStream:
    """Sized stream over one split; for training, the position lives in the data module.

    Each batch is shared out over the ranks. A rank that gets none of an epoch's last examples has an empty batch: it
    takes part in the update without a share of its loss.
    """

    def __init__(self, data: FixedDataModule, split: DataSplit) -> None:
        self.data, self.split = data, split
        trainer: Any = data.trainer
        self.rank, self.ranks = data_parallel_rank(trainer)
        self.accumulation = int(trainer.accumulate_grad_batches) if split == "train" else 1
        self.size = data.batch_size * self.ranks

    def __len__(self) -> int:
        return -(-self.data.count(self.split) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        self.data.before_first_batch()
        yield from self._training() if self.split == "train" else self._evaluation()

    def _training(self) -> Iterator[Batch]:
        due: list[list[int]] = []
        totals: dict[str, BatchTotals] = {}
        # As many batches as an epoch has, wherever it begins: `limit_train_batches` ends epochs amid the data.
        for _ in range(len(self)):
            if not due:
                due = self.data.upcoming(self._pieces(), self.size)
                totals = self.data.totals(self.split, [index for piece in due for index in piece])
            self.data.advance(self.size)
            yield self._share(due.pop(0), totals, self.accumulation * self.ranks)

    def _pieces(self) -> int:
        """How many batches the trainer takes until its next update; an epoch's end cuts accumulation short."""
        trainer: Any = self.data.trainer
        taken = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return int(min(self.accumulation - taken % self.accumulation, max(trainer.num_training_batches - taken, 1)))

    def _evaluation(self) -> Iterator[Batch]:
        for start in range(0, self.data.count(self.split), self.size):
            chosen = list(range(start, min(start + self.size, self.data.count(self.split))))
            # Of a rank's own examples: they are the weights of the means over ranks.
            yield self._share(chosen, self.data.totals(self.split, chosen[self.rank :: self.ranks]), 1)

    def _share(self, chosen: Sequence[int], totals: Mapping[str, BatchTotals], pieces: int) -> Batch:
        own = chosen[self.rank :: self.ranks]
        return Batch(self.data.collate(self.split, own) if own else {}, totals, pieces)
