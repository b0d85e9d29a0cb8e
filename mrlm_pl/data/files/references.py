"""A data module over given answers that computes their log-probabilities before the first update."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.ranks import all_reduce_sum, data_parallel_rank
from mrlm_pl.losses import sequence_logp
from mrlm_pl.policy import Policy


class ReferencedDataModule(FixedDataModule):
    """Base of the data modules whose algorithm may compare the answers with their first log-probabilities.

    These are computed once, before the first update, divided among the ranks, and are part of checkpoints; those of
    examples to validate or test on that a checkpoint lacks, with the policies' initial weights. A subclass sets
    :meth:`batches`.

    Attributes:
        references: log-probabilities [rows] of each split, example after example; empty if the algorithm does not read
            them.
    """

    references: dict[DataSplit, Tensor]
    _referenced: dict[DataSplit, int]  # hashes of the rows that they were computed for

    def tokenize(self) -> None:
        super().tokenize()
        self.references, self._referenced = {}, {}
        self._hashes = {split: self._hash(examples) for split, examples in self.examples.items()}
        self._starts = {  # the place of each example's first row, and at last the number of rows
            split: list(itertools.accumulate((len(self.rows_of(example)) for example in examples), initial=0))
            for split, examples in self.examples.items()
        }

    @abstractmethod
    def batches(self, examples: Sequence[Any]) -> dict[str, tuple[PolicyBatch, Tensor]]:
        """Return the rows of each policy, and the index [B] of each row among :meth:`rows_of` of all examples."""

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        batches = self.batches([self.examples[split][index] for index in chosen])
        if split in self.references:
            starts = self._starts[split]
            indices = torch.tensor([row for index in chosen for row in range(starts[index], starts[index + 1])])
            for rows, numbers in batches.values():
                rows.reference_sums = self.references[split][indices[numbers]]
        return {name: rows for name, (rows, _) in batches.items()}

    def before_first_batch(self) -> None:
        algorithm = self.algorithm()
        trainer = algorithm.trainer
        if not algorithm.reads_reference_sums:
            return
        fits = trainer.state.fn == "fit"
        begins = fits and not self.references and not trainer.global_step
        evaluated: DataSplit = "test" if trainer.state.fn == "test" else "validation"
        for split in self.examples if fits else (evaluated,):
            if self._referenced.get(split) != self._hashes[split]:
                if not self._referenced and not begins:
                    free = ", or use `model.reference_free`" if hasattr(algorithm, "reference_free") else ""
                    raise ConfigurationError(
                        f"data.{split}: {self.sources[split]!r} is compared with a reference, the policy before its "
                        "first update; give the checkpoint of a run, `--ckpt_path RUN/checkpoints/last.ckpt`" + free
                    )
                self.references[split] = self._reference_sums(split, initial=not begins)
                self._referenced[split] = self._hashes[split]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "references": self.references, "referenced": self._referenced}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.references = {split: sums.cpu() for split, sums in state_dict["references"].items()}
        self._referenced = dict(state_dict["referenced"])

    def _hash(self, examples: Sequence[Any]) -> int:
        """Return a hash of the tokens of examples, equal in all processes, as those of numbers are."""
        rows = (row for example in examples for row in self.rows_of(example))
        return hash(tuple(hash((*row.policy.encode(), row.token_ids, row.action_mask)) for row in rows))

    @contextmanager
    def _scoring(self, *, initial: bool) -> Iterator[list[Policy]]:
        """Turn dropout off, and read the initial weights if ``initial``; yield the policies with a copy of these.

        With adapters there is no copy. Each rank has a whole copy, even if the policy itself is sharded.
        """
        algorithm = self.algorithm()
        was_training, policies = algorithm.training, algorithm.trained_policies.values()
        copied = [policy for policy in policies if initial and policy.lora is None and policy.reference is None]
        algorithm.eval()
        try:
            for policy in copied:
                policy.load(reference=True)
                policy.reference.to(algorithm.device)
            yield copied
        finally:
            for policy in copied:
                policy.reference = None
            algorithm.train(was_training)

    @torch.no_grad()
    def _reference_sums(self, split: DataSplit, *, initial: bool = False) -> Tensor:
        """Return the log-probability of the answer in each row; each rank computes a part.

        Args:
            split: split of the rows.
            initial: whether to read and use the initial weights instead of the current ones.
        """
        algorithm, examples = self.algorithm(), self.examples[split]
        trainer = algorithm.trainer
        rank, ranks = data_parallel_rank(trainer)
        starts = self._starts[split]
        with self._scoring(initial=initial) as copied, trainer.precision_plugin.forward_context():
            wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
            sums = torch.zeros(starts[-1], dtype=wide)
            for first in range(0, len(examples), self.batch_size * ranks):
                start = min(first + rank * self.batch_size, len(examples))
                examples_here = examples[start : start + self.batch_size]
                batches = self.batches(examples_here) if examples_here else {}
                for name, policy in algorithm.trained_policies.items():
                    if name in batches:
                        rows, indices = batches[name]
                        logp = (policy.reference_logprobs if initial else policy)(rows.inputs()).cpu()
                        sums[indices + starts[start]] = sequence_logp(logp, rows.action_mask)
                    elif ranks > 1 and policy not in copied:
                        policy.idle_loss()  # sharded ranks make every forward pass together
        return all_reduce_sum(trainer, sums)  # the other ranks have zeros here
