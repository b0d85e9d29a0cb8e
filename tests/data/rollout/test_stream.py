"""The groups of a micro-batch and of its update."""

from __future__ import annotations

import torch

from mrlm_pl.data.rollout.stream import Cut


def test_every_pass_serves_every_group_once_and_an_update_is_its_micro_batches() -> None:
    cut = Cut(passes=2, minibatches=2, accumulation=2)
    assert cut.pieces == 8
    orders = [torch.tensor([3, 1, 0, 2, 5, 4, 7, 6]), torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])]
    found = [
        [part.tolist() for part in cut.update_at(position, lambda number: orders[number])] for position in range(8)
    ]
    assert [update[position % 2] for position, update in enumerate(found)] == [
        [3, 1], [0, 2], [5, 4], [7, 6], [7, 6], [5, 4], [3, 2], [1, 0],
    ]  # fmt: skip
    assert found[:4] == [[[3, 1], [0, 2]], [[3, 1], [0, 2]], [[5, 4], [7, 6]], [[5, 4], [7, 6]]]
