"""The rows of a collection, cut into the pieces that the trainer is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlm_pl.algorithms.base import Algorithm
from mrlm_pl.batch import PolicyBatch
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


def rows_of_piece(
    algorithm: Algorithm,
    rows: Mapping[str, PolicyBatch],
    piece: Tensor,
    update: Tensor,
    over_ranks: Callable[[Tensor], Tensor],
) -> tuple[dict[str, PolicyBatch], dict[str, BatchTotals]]:
    """Each learner's rows with a gradient in a piece, and the size of the whole update that it is part of.

    Args:
        algorithm: whose learners they are.
        rows: of the collection, by policy.
        piece: group numbers.
        update: group numbers, which those of the piece are among.
        over_ranks: the sum of a tensor over all ranks.
    """
    policies: dict[str, PolicyBatch] = {}
    totals: dict[str, BatchTotals] = {}
    for name in algorithm.learners:
        own = rows.get(name)
        size = torch.zeros(3, dtype=torch.float64)
        if own is not None:
            in_update = torch.isin(own.groups.cpu(), update).to(own.groups.device)
            size = batch_totals(own.action_mask[in_update], own.episode_tokens[in_update]).to_tensor()
            useful = algorithm.rows_with_gradient(own)
            chosen = useful[torch.isin(own.groups[useful].cpu(), piece).to(useful.device)]
            if chosen.numel():
                policies[name] = own.select(chosen)
        size = over_ranks(size)
        if size[0] > 0:
            totals[name] = BatchTotals.from_tensor(size)
    return policies, totals
