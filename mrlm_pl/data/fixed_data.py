"""A data module over a fixed set of examples: shuffled epochs, an exact position, the same batches on any machine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from mrlm_pl.algorithms.base import Algorithm
from mrlm_pl.batch import Batch
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.seeding import derive_seed
from mrlm_pl.strategies import data_parallel_rank


class FixedDataModule(LightningDataModule):
    """Base of the data modules over files: a subclass says how many examples there are and makes batches of them.

    Args:
        batch_size: examples in a batch, on each rank.
        seed: of the shuffling.

    Raises:
        ConfigurationError: ``batch_size`` is below 1.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigurationError(f"data.batch_size is {batch_size}; it must be 1 or above")
        self.batch_size, self.seed = batch_size, seed
        self.epoch = 0
        self.position = 0

    @abstractmethod
    def count(self, split: str) -> int:
        """Number of examples in ``train`` or ``validation``."""

    @abstractmethod
    def batch(self, split: str, chosen: Sequence[int], update: Sequence[int], pieces: int) -> Batch:
        """The batch of the examples ``chosen``, one of ``pieces`` pieces of an update on the examples ``update``."""

    def before_first_batch(self) -> None:
        """Called when the model is on its device and a checkpoint has been read, before a batch is made."""

    def train_dataloader(self) -> EpochStream:
        return EpochStream(self, "train")

    def val_dataloader(self) -> EpochStream | list[Any]:
        return EpochStream(self, "validation") if self.count("validation") else []

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "shared_batch": self.shared_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
        earlier = state_dict["shared_batch"]
        if self.position and earlier != self.shared_batch:
            # Another number of ranks: the epoch goes on where its examples do, at the beginning of an update.
            trainer: Any = self.trainer
            position = self.position * earlier // self.shared_batch
            self.position = position - position % int(trainer.accumulate_grad_batches)

    @property
    def shared_batch(self) -> int:
        """Examples in a batch of all ranks together."""
        return self.batch_size * data_parallel_rank(self.trainer)[1]

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

    def order(self, split: str) -> list[int]:
        """Numbers of the examples in the order of this epoch; validation is read in the order of the file."""
        if split != "train":
            return list(range(self.count(split)))
        generator = torch.Generator().manual_seed(derive_seed("shuffle", self.seed, self.epoch))
        return torch.randperm(self.count(split), generator=generator).tolist()


class EpochStream:
    """Sized stream over one split; for training, the position lives in the data module."""

    def __init__(self, data: FixedDataModule, split: str) -> None:
        self.data, self.split = data, split
        trainer: Any = data.trainer
        self.rank, self.ranks = data_parallel_rank(trainer)
        self.accumulation = int(trainer.accumulate_grad_batches) if split == "train" else 1

    def __len__(self) -> int:
        return -(-self.data.count(self.split) // self.data.shared_batch)

    def __iter__(self) -> Iterator[Batch]:
        self.data.before_first_batch()
        if self.split != "train":
            for number in range(len(self)):
                yield self._batch(number, self.data.order(self.split))
            return
        # As many batches as an epoch has, wherever it begins: `limit_train_batches` ends epochs amid the data.
        for _ in range(len(self)):
            number, order = self.data.position, self.data.order(self.split)
            self.data.position += 1
            if self.data.position == len(self):
                self.data.epoch, self.data.position = self.data.epoch + 1, 0
            yield self._batch(number, order)

    def _batch(self, number: int, order: Sequence[int]) -> Batch:
        size = self.data.shared_batch
        start = number - number % self.accumulation
        update = order[start * size : (start + self.accumulation) * size]
        shared = order[number * size : (number + 1) * size]
        # The last batch of an epoch may be short: it is shared evenly too, and a rank may be left without rows.
        first, stop = (len(shared) * edge // self.ranks for edge in (self.rank, self.rank + 1))
        batch = self.data.batch(self.split, shared[first:stop] or shared[:1], update, self.accumulation * self.ranks)
        return batch if stop > first else Batch({}, batch.totals, batch.pieces)
