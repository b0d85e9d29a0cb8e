"""The mini-batches of a run: the rows of a rollout, and the position in them.

A rollout is served ``passes`` times. Each pass shuffles its groups and divides them into ``minibatches`` optimizer
updates, and each update into ``accumulation`` micro-batches, which are Lightning's batches: whole groups, or parts of a
group where an update has fewer groups (:class:`GroupPart`). :class:`TrainingStream` keeps the position as the number of
served micro-batches; :func:`micro_batches` builds those of an update.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.data.rollout.collection import RolloutCollection
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.contract import RolloutLearner
from mrlm_pl.learner.ranks import all_reduce_sum, data_parallel_rank, gather_at_first_rank
from mrlm_pl.losses import BatchTotals, batch_totals
from mrlm_pl.seeding import derive_seed
from mrlm_pl.trainer.bounds import batches_in_all, batches_served

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GroupPart:
    """Rows of a micro-batch: those of whole groups, or one part of the rows of a group.

    Attributes:
        groups: [g], indices of the groups.
        part: index of the part, from 0.
        parts: number of parts. Their numbers of rows differ by at most one; surplus parts are empty.
    """

    groups: Tensor
    part: int = 0
    parts: int = 1

    def select(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of this part out of all rows of its groups, both by policy.

        Each policy's rows are consecutive, so that few parts compute the same prefix.

        >>> rows = {"first": torch.tensor([3, 4, 5]), "second": torch.tensor([6, 7])}
        >>> [[part.tolist() for part in GroupPart(torch.tensor([0]), n, 2).select(rows).values()] for n in range(2)]
        [[[3, 4, 5], []], [[], [6, 7]]]
        """
        sizes = [len(policy_rows) for policy_rows in rows.values()]
        least, longer = divmod(sum(sizes), self.parts)
        start = self.part * least + min(self.part, longer)  # the first ``longer`` parts have a row more
        in_part = torch.zeros(sum(sizes), dtype=torch.bool)
        in_part[start : start + least + (self.part < longer)] = True
        return {name: indices[mask] for (name, indices), mask in zip(rows.items(), in_part.split(sizes), strict=True)}


def prefix_order(token_ids: Tensor) -> Tensor:
    """Return the lexicographic order [B] of rows of tokens [B, T]: rows with a common prefix are adjacent.

    >>> prefix_order(torch.tensor([[7, 1], [300, 0], [7, 0], [5, 2]])).tolist()
    [3, 2, 0, 1]
    """
    keys = [row.tobytes() for row in token_ids.numpy().astype(">i8")]  # bytes compare much faster than their numbers
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)


class TrainingStream:
    """Serves the mini-batches of an epoch, and collects a rollout when the last one is used up.

    It is the loader of the data module, and owns the position. Sized, because Lightning prefetches from an unsized
    loader and would collect with weights one step old.

    Args:
        collection: source of the rollouts.
        passes: number of passes over a rollout.
        minibatches: number of optimizer updates in one pass.
        iterations: number of rollouts in an epoch of the trainer.

    Attributes:
        extended: whether the checkpoint was at the end of its first epoch and this run has more iterations.
        checkpoint_batches: number of micro-batches of a rollout in the checkpoint; 0 without a checkpoint.
        dropped_batches: number of micro-batches of the checkpoint's rollout that are not served.
    """

    def __init__(self, collection: RolloutCollection, passes: int, minibatches: int, iterations: int) -> None:
        self.collection, self.iterations = collection, iterations
        self.passes, self.minibatches = passes, minibatches
        self._begin()

    def _begin(self) -> None:
        self.iteration = self.position = 0
        self.extended, self.checkpoint_batches, self.dropped_batches = False, 0, 0
        self._rows: dict[str, PolicyBatch] | None = None
        self._update: tuple[int, int] | None = None
        self._batches: list[Batch] = []
        self._metrics: dict[str, float] = {}

    def restart(self) -> None:
        """Begin again for another algorithm, which would otherwise train on the rest of the previous one's rollout."""
        self._begin()
        self.collection.restart()

    @property
    def accumulation(self) -> int:
        """Number of micro-batches (Lightning batches) of an update."""
        return int(self.collection.trainer.accumulate_grad_batches)

    @property
    def batches(self) -> int:
        """Number of micro-batches of a rollout."""
        return self.passes * self.minibatches * self.accumulation

    def __len__(self) -> int:
        return self.iterations * self.batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """Return the next micro-batch; the first of an iteration collects its rollout."""
        if self._rows is None:
            self._rows, self._metrics = self.collection.collect(self.iteration, self._last_ahead())
        elif self.position == self.batches // self.passes:  # all rows have been in an update
            self.collection.write_tokens()
        learner, trainer = self.collection.learner, self.collection.trainer
        if learner.collection_over:
            # The stream keeps its length, which schedules and the other ranks rely on; these batches change nothing.
            batch = Batch({}, {})
        else:
            update = (self.iteration, self.position // self.accumulation)
            if update != self._update:
                sum_ranks = functools.partial(all_reduce_sum, trainer)
                self._batches = micro_batches(learner, self._rows, self.update_at(self.position), sum_ranks)
                self._update = update
            batch = self._batches[self.position % self.accumulation]
            batch.metrics = self._metrics
            batch.on_policy = self.position < self.accumulation and self.collection.on_policy
        batch.micro_batches = self.accumulation * data_parallel_rank(trainer)[1]
        self._metrics = {}
        self.position += 1
        if self.position == self.batches:
            self._rows, self._batches, self.position, self.iteration = None, [], 0, self.iteration + 1
        return batch

    def update_at(self, position: int) -> list[GroupPart]:
        """Return the micro-batches of the update at a position in the rollout.

        An update with more micro-batches than groups divides each group into as many parts.
        """
        pass_number, update = divmod(position // self.accumulation, self.minibatches)
        groups = self._shuffled_groups(pass_number).chunk(self.minibatches)[update]
        parts = max(1, self.accumulation // len(groups))
        chunks = groups.chunk(self.accumulation // parts)
        return [GroupPart(chunk, part, parts) for chunk in chunks for part in range(parts)]

    def _shuffled_groups(self, pass_number: int) -> Tensor:
        """Return this rank's group indices in the order in which a pass serves them."""
        rank, ranks = data_parallel_rank(self.collection.trainer)
        plan = self.collection.plan
        generator = torch.Generator().manual_seed(derive_seed("shuffle", plan.seed, self.iteration, pass_number, rank))
        return torch.randperm(plan.groups // ranks, generator=generator)

    def _last_ahead(self) -> int:
        """Return the last iteration that may begin now: at most ``max_lag`` ahead, within the trainer's bounds.

        A trainer counts from 0, and the data may have been in another one before.
        """
        trainer, lag = self.collection.trainer, self.collection.max_lag
        if not lag or math.isinf(in_all := batches_in_all(trainer)):
            return self.iteration + lag
        iterations_left = math.ceil(in_all / self.batches) - round(batches_served(trainer) / self.batches)
        return self.iteration + max(0, min(lag, iterations_left - 1))

    def _shape(self) -> dict[str, Any]:
        """Return the options that decide how a rollout is served."""
        plan = self.collection.plan
        return {
            "data.groups": plan.groups,
            "data.group_size": dict(plan.group_sizes),
            "data.passes": self.passes,
            "data.minibatches": self.minibatches,
            "trainer.accumulate_grad_batches": self.accumulation,
        }

    def state(self) -> dict[str, Any]:
        """Return rows and position for a checkpoint; all ranks call it."""
        if self.position in (0, self.batches // self.passes):
            self.collection.write_tokens()
        rows = None if self._rows is None else {name: batch.tensors() for name, batch in self._rows.items()}
        return {
            "iteration": self.iteration,
            "position": self.position,
            "rows": gather_at_first_rank(rows),
            "shape": self._shape(),
            "iterations": self.iterations,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the value of :meth:`state`.

        Raises:
            ConfigurationError: the rest of the rollout, or of the epoch, cannot be served with these options.
        """
        self.iteration, self.position = state["iteration"], state["position"]
        self._rows, self._update, self._batches = None, None, []
        saved_iterations = state.get("iterations", self.iterations)
        self.extended = self.iterations > saved_iterations == self.iteration and not self.position
        if self.iterations != saved_iterations and self.iteration >= saved_iterations and not self.extended:
            raise ConfigurationError(
                f"data.iterations is {self.iterations}, but the checkpoint has completed {self.iteration} in epochs of "
                f"{saved_iterations}, which the trainer counts by; resume with data.iterations {saved_iterations}, and "
                "raise trainer.max_epochs to train further"
            )
        if not self.position:
            names = ("data.passes", "data.minibatches", "trainer.accumulate_grad_batches")
            self.checkpoint_batches = math.prod(state["shape"][name] for name in names)
            return
        for name, value in self._shape().items():
            if (saved := state["shape"].get(name, value)) != value:
                raise ConfigurationError(
                    f"{name} is {value}, but the checkpoint is in the middle of a rollout with {saved}; resume with "
                    f"{saved}, or change it after completing this rollout with data.iterations {self.iteration + 1}"
                )
        ranks, trainer = state["rows"], self.collection.trainer
        if len(ranks) == trainer.world_size:
            self._rows = {name: PolicyBatch(**tensors) for name, tensors in ranks[trainer.global_rank].items()}
            return
        # The rows were divided among other ranks, and episodes are numbered by iteration.
        logger.warning(
            "the checkpoint is of %d processes and this run has %d: the rest of collection %d is dropped",
            len(ranks),
            trainer.world_size,
            self.iteration,
        )
        self.dropped_batches = self.batches - self.position
        self.iteration, self.position = self.iteration + 1, 0


def micro_batches(
    learner: RolloutLearner,
    rows: Mapping[str, PolicyBatch],
    parts: Sequence[GroupPart],
    sum_ranks: Callable[[Tensor], Tensor],
) -> list[Batch]:
    """Return the micro-batches of an update, with each learner's rows and the size of the whole update.

    Args:
        learner: algorithm that trains on the micro-batches.
        rows: rows of the rollout by policy, on the host.
        parts: rows of each micro-batch.
        sum_ranks: function that returns the sum of a tensor over all ranks; called once.
    """
    update = torch.cat([part.groups for part in parts])
    # sorted, so that the parts of all ranks have the same policies
    orders = {name: torch.isin(rows[name].groups, update).nonzero().flatten() for name in sorted(rows)}
    if any(part.parts > 1 for part in parts):  # sorted once: an update may have hundreds of parts
        orders = {name: order[prefix_order(rows[name].token_ids[order])] for name, order in orders.items()}
    rows_of_parts = [
        part.select({name: order[torch.isin(rows[name].groups[order], part.groups)] for name, order in orders.items()})
        for part in parts
    ]
    names = list(learner.learners)
    training: list[dict[str, PolicyBatch]] = [{} for _ in parts]
    without_gradient: list[dict[str, PolicyBatch]] = [{} for _ in parts]
    # One tensor, so that the ranks talk once: of each learner its BatchTotals, and 1 for each part with other rows.
    fields = len(dataclasses.fields(BatchTotals))
    sizes = torch.zeros(len(names), fields + len(parts), dtype=torch.float64)
    for size, name in zip(sizes, names, strict=True):
        if name not in orders:
            continue
        policy_rows, order = rows[name], orders[name]
        local_totals = batch_totals(policy_rows.action_mask[order], policy_rows.episode_tokens[order])
        size[:fields] = torch.tensor(dataclasses.astuple(local_totals), dtype=torch.float64)
        acting = policy_rows.action_mask.any(-1)
        trained = torch.zeros_like(acting).index_fill(0, learner.rows_with_gradient(policy_rows), True)
        for number, part in enumerate(rows_of_parts):
            indices = part[name]
            if trained[indices].any():
                training[number][name] = policy_rows.select(indices[trained[indices]])
            if (untrained := ~trained[indices] & acting[indices]).any():
                without_gradient[number][name] = policy_rows.select(indices[untrained])
                size[fields + number] = 1.0
    sizes_by_learner = dict(zip(names, sum_ranks(sizes), strict=True))
    totals = {name: BatchTotals(*size[:fields].tolist()) for name, size in sizes_by_learner.items() if size[0] > 0}
    batches = []
    for number, (policies, others) in enumerate(zip(training, without_gradient, strict=True)):
        on_any_rank = {name: others.get(name) for name, size in sizes_by_learner.items() if size[fields + number] > 0}
        batches.append(Batch(policies, totals, without_gradient=on_any_rank))
    return batches
