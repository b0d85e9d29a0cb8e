"""The common beginnings of rows, and their division into chunks.

The rows of a label are the leaves of a tree: a common beginning is one segment, computed once. The tree is an order of
its leaves, and for each leaf the number of tokens that it shares with the leaf before.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlm_pl.grouping import grouped

LEAST_SAVING = 32
"""Fewest tokens that a shared segment saves: each makes the attention's batches smaller and more ragged."""
CHUNK_COST = 32
"""Cost of a chunk, in tokens: rows stay together if that saves more than further chunks cost."""

MOST_READ = 8
"""Most tokens of a chunk's rows, in multiples of its bound. Each row reads its whole beginning: shared keys and values,
and the states that predict its actions, are copied for it."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``start`` to ``stop`` of a leaf, computed once for the leaves that share them.

    ``chain[level]`` is the number of the ancestor segment at that level; the segment's own level is ``len(chain)``.
    """

    leaf: int
    start: int
    stop: int
    chain: tuple[int, ...]


@dataclass(frozen=True)
class RowTree:
    """The rows to feed, as the leaves of trees of shared tokens.

    Attributes:
        rows: row of each leaf, followed by the rows that are its beginnings.
        fed: number of tokens of each leaf.
        shared: number of tokens that each leaf shares with the leaf before.
    """

    rows: list[list[int]]
    fed: list[int]
    shared: list[int]

    @classmethod
    def of(cls, token_ids: Tensor, fed_lengths: Sequence[int], labels: Tensor | None) -> RowTree:
        """Return the tree of the first ``fed_lengths`` tokens of rows [B, T]; rows with 0 are left out.

        Rows with the same label in ``labels`` [B] share tokens. Labels are in the order of their longest rows: adjacent
        rows of similar length need the least padding inside the attention.
        """
        active = [row for row, fed in enumerate(fed_lengths) if fed]
        if labels is None:
            active.sort(key=lambda row: -fed_lengths[row])
            return cls([[row] for row in active], [fed_lengths[row] for row in active], [0] * len(active))
        order, common = _sort_rows(token_ids, fed_lengths, labels.tolist(), active)
        tree = cls([], [], [])
        least = 0
        for row, shared in zip(order, common, strict=True):
            least = min(least, shared)
            if shared == fed_lengths[row] and len(tree.rows[-1]) < MOST_READ:
                tree.rows[-1].append(row)
                continue
            tree.rows.append([row])
            tree.fed.append(fed_lengths[row])
            tree.shared.append(min(least, fed_lengths[row] - 1))
            least = fed_lengths[row]
        tree._keep_worthwhile()
        return tree

    def _keep_worthwhile(self) -> None:
        """Share less where a segment would save too little."""
        all_shared = list(self.shared)
        due = [(0, len(all_shared), 0)] if all_shared else []
        while due:
            first, last, start = due.pop()
            if last - first == 1:
                continue
            common = min(all_shared[first + 1 : last])
            branches = [leaf for leaf in range(first + 1, last) if all_shared[leaf] == common]
            if (last - first - 1) * (common - start) < LEAST_SAVING:
                common = start
            for leaf in branches:
                self.shared[leaf] = common
            due += [(a, b, common) for a, b in itertools.pairwise([first, *branches, last])]

    def chunks(self, max_tokens: int | None) -> list[range]:
        """Return the leaves per chunk: at most ``max_tokens`` tokens, or a single leaf.

        The rows of a chunk, with shared tokens counted for each, have at most ``MOST_READ`` times as many.

        Leaves are separated where it costs least: tokens shared with the leaf before are computed again. Among equal
        costs the division with the smallest largest chunk is taken.
        """
        leaves = len(self.fed)
        ends = list(itertools.accumulate((f - s for f, s in zip(self.fed, self.shared, strict=True)), initial=0))
        read = list(
            itertools.accumulate((f * len(rows) for f, rows in zip(self.fed, self.rows, strict=True)), initial=0)
        )
        if max_tokens is None or (ends[-1] <= max_tokens and read[-1] <= MOST_READ * max_tokens):
            return [range(leaves)] if leaves else []
        most_read = MOST_READ * max_tokens

        def within(bound: int) -> tuple[int, list[range]]:
            return self._cheapest(ends, read, bound, most_read)

        cost, _ = within(max_tokens)
        least = bisect_left(range(max_tokens), True, lo=1, key=lambda bound: within(bound)[0] == cost)
        return within(least)[1]

    def _cheapest(
        self, ends: Sequence[int], read: Sequence[int], max_tokens: int, most_read: int
    ) -> tuple[int, list[range]]:
        """Return the cost of the cheapest chunks within bounds, in tokens that are computed again, and the chunks.

        Args:
            ends: for each leaf, and the end, the number of tokens that the leaves before it compute in one chunk.
            read: for each leaf, and the end, the number of tokens in the rows of the leaves before it.
            max_tokens: maximum number of tokens that a chunk computes.
            most_read: maximum number of tokens in the rows of a chunk.
        """
        leaves = len(self.fed)
        best, begin = [0], [0]
        # where the last chunk may begin, the costs increasing: the first is the best
        starts: deque[int] = deque()
        for last in range(1, leaves + 1):
            cost = best[last - 1] + self.shared[last - 1]
            while starts and best[starts[-1]] + self.shared[starts[-1]] >= cost:
                starts.pop()
            starts.append(last - 1)
            while len(starts) > 1 and (
                ends[last] - ends[starts[0]] + self.shared[starts[0]] > max_tokens
                or read[last] - read[starts[0]] > most_read
            ):
                starts.popleft()
            best.append(best[starts[0]] + self.shared[starts[0]] + CHUNK_COST)
            begin.append(starts[0])
        chunks = []
        last = leaves
        while last:
            chunks.append(range(begin[last], last))
            last = begin[last]
        return best[leaves], chunks[::-1]

    def segments(self, leaves: range) -> tuple[list[list[Segment]], list[Segment]]:
        """Return the shared segments of some consecutive leaves, by level, and each leaf's own segment."""
        levels: list[list[Segment]] = []
        own_segments = []
        due: list[tuple[int, int, int, tuple[int, ...]]] = [(leaves.start, leaves.stop, 0, ())]
        while due:
            first, last, start, chain = due.pop()
            if last - first == 1:
                own_segments.append(Segment(first, start, self.fed[first], chain))
                continue
            common = min(self.shared[first + 1 : last])
            if common > start:
                if len(chain) == len(levels):
                    levels.append([])
                levels[len(chain)].append(Segment(first, start, common, chain))
                chain = (*chain, len(levels[len(chain)]) - 1)
            branches = [leaf for leaf in range(first + 1, last) if self.shared[leaf] == common]
            due += [(a, b, common, chain) for a, b in itertools.pairwise([first, *branches, last])][::-1]
        return levels, own_segments


def _sort_rows(
    token_ids: Tensor, fed_lengths: Sequence[int], labels: Sequence[int], rows: list[int]
) -> tuple[list[int], list[int]]:
    """Return rows in an order in which common beginnings are adjacent, and the tokens shared with the row before.

    A row that is the beginning of others follows them.
    """
    longest = {label: max(fed) for label, fed in grouped((labels[row], fed_lengths[row]) for row in rows).items()}
    fed = torch.tensor(fed_lengths)
    end = torch.iinfo(torch.int32).max
    ids = token_ids.where(torch.arange(token_ids.shape[1]) < fed[:, None], end)
    keys = ids.numpy().astype(">u4")
    rank = {label: index for index, label in enumerate(sorted(longest, key=lambda label: -longest[label]))}
    order = sorted(rows, key=lambda row: (rank[labels[row]], keys[row].tobytes()))
    sorted_ids = ids[order]
    differs = sorted_ids[1:] != sorted_ids[:-1]
    same = torch.where(differs.any(1), differs.int().argmax(1), token_ids.shape[1]).tolist()
    common = [
        min(length, fed_lengths[row]) if labels[row] == labels[before] else 0
        for length, before, row in zip(same, order, order[1:], strict=False)
    ]
    return order, [0, *common]
