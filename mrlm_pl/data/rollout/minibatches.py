"""The rows of a collection, cut into the pieces that the trainer is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.losses import BatchTotals, batch_totals


@dataclass(frozen=True)
class Cut:
    """How a collection is cut: ``passes`` times into ``minibatches`` updates, each of ``accumulation`` pieces."""

    passes: int
    minibatches: int
    accumulation: int

    @property
    def pieces(self) -> int:
        """Lightning batches that a collection is served as."""
        return self.passes * self.minibatches * self.accumulation

    def groups_at(self, position: int, shuffled: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        """Groups of the piece at a position, and those of the whole update that it is part of.

        Args:
            position: of the piece, from 0.
            shuffled: group numbers in the order in which a pass, counted from 0, serves them.
        """
        per_pass = self.minibatches * self.accumulation
        pass_number, piece = divmod(position, per_pass)
        order = shuffled(pass_number).chunk(per_pass)
        first = piece - piece % self.accumulation
        return order[piece], torch.cat(order[first : first + self.accumulation])


def micro_batch(
    algorithm: Algorithm,
    rows: Mapping[str, PolicyBatch],
    piece: Tensor,
    update: Tensor,
    over_ranks: Callable[[Tensor], Tensor],
) -> Batch:
    """Return each learner's rows in a micro-batch, and the size of the whole update that it is part of.

    Args:
        algorithm: whose learners they are.
        rows: of the rollout, by policy.
        piece: group numbers of the micro-batch.
        update: group numbers of the update.
        over_ranks: the sum of a tensor over all ranks.
    """
    policies: dict[str, PolicyBatch] = {}
    totals: dict[str, BatchTotals] = {}
    without_gradient: dict[str, PolicyBatch | None] = {}
    for name in algorithm.learners:
        own = rows.get(name)
        size, others = torch.zeros(3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        if own is not None:
            in_update = torch.isin(own.groups.cpu(), update).to(own.groups.device)
            size = batch_totals(own.action_mask[in_update], own.episode_tokens[in_update]).to_tensor()
            here = torch.isin(own.groups.cpu(), piece).to(own.groups.device)
            trained = torch.zeros_like(here).index_fill(0, algorithm.rows_with_gradient(own), True)
            if (here & trained).any():
                policies[name] = own.select((here & trained).nonzero().flatten())
            others = (here & ~trained & own.action_mask.any(-1)).nonzero().flatten()
            without_gradient[name] = own.select(others) if others.numel() else None
        *size_of_all, others_of_all = over_ranks(torch.cat([size, torch.tensor([float(others.numel())])]))
        if size_of_all[0] > 0:
            totals[name] = BatchTotals.from_tensor(torch.stack(size_of_all))
        if others_of_all > 0:
            without_gradient.setdefault(name, None)
        else:
            without_gradient.pop(name, None)
    return Batch(policies, totals, without_gradient=without_gradient)
