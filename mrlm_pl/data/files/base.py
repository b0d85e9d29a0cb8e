"""A data module over a fixed set of examples: shuffled epochs, an exact position, the same batches on any machine."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jinja2 import TemplateError
from lightning.pytorch import LightningDataModule

from mrlm_pl import data
from mrlm_pl.answers.records import read_records
from mrlm_pl.data.files.chat_rows import CompactTrajectory
from mrlm_pl.environment.rows import warn_of_training_rows, without_arrow_nulls
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.ranks import data_parallel_rank
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import Policy
from mrlm_pl.seeding import derive_seed, run_seed
from mrlm_pl.settings import ChecksArguments, PositiveInt

logger = logging.getLogger(__name__)

DataSplit = Literal["train", "validation", "test"]


class FixedDataModule(ChecksArguments, LightningDataModule, ABC):
    """Base of the data modules over files: subclasses read, tokenize and collate the examples.

    The position in an epoch counts examples, so a run may continue with another batch size or number of ranks, but not
    with other examples.

    Args:
        train: file (JSONL, JSON, CSV or Parquet, optionally .zst or .gz), a run's folder of episodes, or hub name.
        validation: source for the validation loop, in the same forms; None skips validation.
        test: source for ``mrlm test``, in the same forms; optional.
        batch_size: number of examples in a batch, on each rank.
        max_tokens: longest row in tokens; examples with a longer one are left out and counted. None is the context
            window of the row's policy.
        seed: seed of the shuffling; None is 0. The command passes ``--seed_everything``.

    Attributes:
        examples: tokenized examples by split.

    Raises:
        ConfigurationError: a number is below 1.
        DataError: a file is missing, or a row lacks its fields.
    """

    algorithms: ClassVar[tuple[type[Algorithm], ...]]
    """Algorithms that train on the examples."""

    unit: ClassVar[str]
    """Name of an example, for messages."""

    form: ClassVar[str] = ""
    """The fields of a data row, for messages."""

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        batch_size: PositiveInt = 32,
        max_tokens: PositiveInt | None = None,
        seed: int | None = None,
        test: str | None = None,
    ) -> None:
        super().__init__()
        sources_by_split: dict[DataSplit, str | None] = {"train": train, "validation": validation, "test": test}
        for split, source in sources_by_split.items():
            if not isinstance(source, str | os.PathLike | None):
                raise ConfigurationError(
                    f"data.{split} is a {type(source).__name__}; give the path of a file, a folder of episodes, or an "
                    "id on the Hugging Face Hub"
                )
        self.sources: dict[DataSplit, str] = {split: source for split, source in sources_by_split.items() if source}
        for split in self.sources:
            warn_of_training_rows(self.sources, split)
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, run_seed(seed)
        self.epoch = 0
        self.position = 0
        self._examples = {split: self.read(source, split) for split, source in self.sources.items()}
        self.examples: dict[DataSplit, list[Any]] = {}
        self._tokenized_for: Algorithm | None = None
        self._fitted: Algorithm | None = None
        self._digest = ""

    def read(self, source: str, split: str) -> list[Any]:
        """Return the examples of a source before they are tokenized.

        Raises:
            DataError: the source is missing or unreadable, a row has a fault, some are episodes, or all failed.
        """
        examples, episodes = list[Any](), list[Episode]()
        for where, episode, row in read_records(source, split):
            if examples if episode else episodes:
                raise DataError(f"{where} is {'an' if episode else 'not an'} episode record, unlike those before it")
            if episode:
                episodes.append(episode.with_rows(lambda played: CompactTrajectory(**vars(played))))
                continue
            try:
                examples.append(self.of_row(without_arrow_nulls(source, row)))
            except (ValueError, DataError) as fault:
                fields = f"a row is {self.form}, and this one has the fields {sorted(row)}"
                raise DataError(f"{where}: {fault}; {fields}") from fault
        return self.of_episodes(_played(episodes, source), source) if episodes else examples

    def of_row(self, row: Mapping[str, Any]) -> Any:
        """Return the example in a data row.

        Raises:
            ValueError: the row has a fault.
        """
        return row

    def of_episodes(self, episodes: Sequence[Episode], source: str) -> list[Any]:
        """Return the examples in episodes.

        Raises:
            DataError: the episodes contain no examples.
        """
        return list(episodes)

    @abstractmethod
    def tokenized(self, example: Any) -> list[Any]:
        """Return the tokenized examples made from one that :meth:`read` returned.

        Raises:
            ValueError: the chat template rejects the example.
        """

    def rows_of(self, example: Any) -> Sequence[Trajectory]:
        """Return the trained rows of a tokenized example; an example without rows is left out."""
        rows: Sequence[Trajectory] = example.rows
        return rows

    def setup(self, stage: str) -> None:
        split = {"validate": "validation", "test": "test"}.get(stage)
        if split is not None and split not in self.sources:
            raise ConfigurationError(f"data.{split} names no file; give one, as in `--data.{split} held_out.jsonl`")
        algorithm = self.algorithm()
        if not isinstance(algorithm, self.algorithms) and algorithm.data_module != type(self).__name__:
            names = " and ".join(cls.__name__ for cls in self.algorithms)
            raise ConfigurationError(
                f"{type(self).__name__} is for {names}, not for {type(algorithm).__name__}; give that one "
                f"{data_option(algorithm)}"
            )
        if self._tokenized_for is not algorithm:
            self.tokenize()
            self._tokenized_for = algorithm
        if stage == "fit":
            if self._fitted not in (None, algorithm):
                self.epoch, self.position = 0, 0  # of the algorithm before
            self._fitted = algorithm

    def tokenize(self) -> None:
        """Set :attr:`examples` for the algorithm.

        Raises:
            DataError: the chat template rejects an example, or all examples of a source are too long.
        """
        algorithm = self.algorithm()
        self.examples, self._tokenized_for = {}, None
        limits = {name: self.max_tokens or algorithm.policy(name).context_window for name in algorithm.policies}
        for split, source in self.sources.items():
            tokenized = []
            for number, given in enumerate(self._examples[split], start=1):
                try:
                    tokenized += self.tokenized(given)
                except (TemplateError, TypeError, ValueError) as fault:
                    raise DataError(f"{source}, row {number}: {fault}") from fault
            fits = [
                [len(row.token_ids) <= limits[row.policy] for row in self.rows_of(example)] for example in tokenized
            ]
            fitting = [example for example, rows in zip(tokenized, fits, strict=True) if rows and all(rows)]
            limit = f"{min(limits.values())} tokens, {'data.max_tokens' if self.max_tokens else 'the context window'}"
            if not fitting:
                raise DataError(f"no {self.unit} of {source!r} fits into {limit}; give shorter ones or a larger limit")
            if len(fitting) < len(tokenized):
                left_out = f"{len(tokenized) - len(fitting)} of {len(tokenized)} examples of {source}"
                logger.warning("left out %s: longer than %s, or without tokens to learn from", left_out, limit)
            self.examples[split] = fitting
        digest = hashlib.sha256()
        for example in self.examples["train"]:
            digest.update(repr(self.taught(example)).encode())
        self._digest = digest.hexdigest()[:16]

    def taught(self, example: Any) -> Any:
        """Return the messages and labels of a tokenized example; its tokens may hold the date that they were made."""
        rows = self.rows_of(example)
        return [(row.policy, row.num_actions, [message.to_chat() for message in row.messages]) for row in rows]

    def count(self, split: DataSplit) -> int:
        """Return the number of examples in a split; 0 for a split without a source."""
        return len(self.examples.get(split, ()))

    @abstractmethod
    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        """Return the rows of the examples ``chosen``, of which there is at least one, by policy."""

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        """Return the size of an update by policy; its episodes are examples, of which a policy counts its fraction."""
        sizes: dict[str, BatchTotals] = {}
        for rows in (self.rows_of(self.examples[split][index]) for index in update):
            tokens = sum(row.num_actions for row in rows)
            for row in rows:
                size = BatchTotals(float(row.num_actions), 1.0, row.num_actions / tokens)
                sizes[row.policy] = sizes.get(row.policy, BatchTotals(0.0, 0.0, 0.0)) + size
        return sizes

    def before_first_batch(self) -> None:
        """Prepare for the first batch; called after the model is on its device and a checkpoint has been read."""

    def train_dataloader(self) -> EpochStream:
        return EpochStream(self, "train")

    def val_dataloader(self) -> EpochStream | list[Any]:
        return EpochStream(self, "validation") if self.count("validation") else []

    def test_dataloader(self) -> EpochStream:
        return EpochStream(self, "test")

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "digest": self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("digest") != self._digest and self.algorithm().trainer.state.fn == "fit":
            raise ConfigurationError(
                f"data.train: {self.sources['train']!r} differs from the examples the run started with, or an earlier "
                "version, which names none, wrote the checkpoint; resume the run with its files, settings and version, "
                "or train on others in a new run, whose model is RUN/policies/NAME"
            )
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]

    def algorithm(self) -> Algorithm:
        """Return the algorithm that is trained.

        Raises:
            ConfigurationError: the trainer's module is not an Algorithm.
        """
        module = getattr(self.trainer, "lightning_module", None)
        if not isinstance(module, Algorithm):
            raise ConfigurationError(f"{type(module).__name__} is not an Algorithm; {type(self).__name__} needs one")
        return module

    def learner(self) -> tuple[str, Policy]:
        """Return the name and the policy that the examples train."""
        return next(iter(self.algorithm().learners.items()))

    def upcoming(self, size: int) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """Yield the training examples of each batch of at most ``size``, with the epoch and position after it."""
        position, count = self.position, self.count("train")
        for epoch in itertools.count(self.epoch):
            order = self.order(epoch)
            for stop in range(position + size, count + size, size):
                yield order[stop - size : stop], (epoch, stop) if stop < count else (epoch + 1, 0)
            position = 0

    def order(self, epoch: int) -> list[int]:
        """Return the numbers of the training examples in the order of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed("shuffle", self.seed, epoch))
        return torch.randperm(self.count("train"), generator=generator).tolist()


class EpochStream:
    """Sized stream over one split; for training, the position lives in the data module.

    The ranks divide each batch. A rank without any of an epoch's last examples has an empty batch, so that it joins the
    update.
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
        due: list[tuple[list[int], tuple[int, int]]] = []
        upcoming = self.data.upcoming(self.size)
        # As many batches as an epoch has, wherever it begins: `limit_train_batches` ends epochs amid the data.
        for _ in range(len(self)):
            if not due:
                due = list(itertools.islice(upcoming, self._batches_to_update()))
                totals = self.data.totals(self.split, [index for chosen, _ in due for index in chosen])
            chosen, (self.data.epoch, self.data.position) = due.pop(0)
            yield self._batch(chosen, totals, self.accumulation * self.ranks)

    def _batches_to_update(self) -> int:
        """Return the number of batches until the next update; the end of an epoch ends an accumulation early."""
        trainer: Any = self.data.trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return int(min(self.accumulation - batches % self.accumulation, max(trainer.num_training_batches - batches, 1)))

    def _evaluation(self) -> Iterator[Batch]:
        for start in range(0, self.data.count(self.split), self.size):
            chosen = list(range(start, min(start + self.size, self.data.count(self.split))))
            # Of a rank's own examples: they are the weights of the means over ranks.
            yield self._batch(chosen, self.data.totals(self.split, chosen[self.rank :: self.ranks]), 1)

    def _batch(self, chosen: Sequence[int], totals: Mapping[str, BatchTotals], micro_batches: int) -> Batch:
        own = chosen[self.rank :: self.ranks]
        return Batch(self.data.collate(self.split, own) if own else {}, totals, micro_batches)


def _played(episodes: Sequence[Episode], source: str) -> list[Episode]:
    """Return the episodes that did not fail."""
    played = [episode for episode in episodes if not episode.failed]
    if not played:
        raise DataError(f"every episode of {source} failed, {len(episodes)} in all; there is nothing to learn from")
    if len(played) < len(episodes):
        logger.warning("left out %d failed episodes of %s", len(episodes) - len(played), source)
    for episode, row in [(member, row) for member in played for row in member.rows()]:
        tokens = len(row.token_ids)
        for turn in row.turns:
            if not 0 <= turn.start <= turn.stop <= tokens:
                raise DataError(
                    f"{source}, episode {episode.id!r}: a turn of {row.agent!r} goes from {turn.start} to {turn.stop} "
                    f"in a row of {tokens} tokens"
                )
    return played


def data_option(algorithm: Algorithm) -> str:
    """Return the option that names an algorithm's data module, with the arguments that it requires.

    The settings of another data module would be rejected, hence the empty ``init_args``.
    """
    module = getattr(data, algorithm.data_module, None)
    parameters = inspect.signature(module).parameters if module else {}
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    options = "".join(f" --data.{name} {name.upper()}" for name in needed)
    return f"`--data '{{class_path: {algorithm.data_module}, init_args: {{}}}}'{options}`"
