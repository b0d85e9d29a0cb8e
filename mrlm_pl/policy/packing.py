"""How the rows of a batch are laid out for the model: packed behind shared prefixes, or padded, in bounded chunks.

All arithmetic here is on the host: the layout decides shapes, so it must be known before a kernel starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Lengths of the pieces of a packed row: every group's prefix, then every row's own tokens, in this order.

    ``row_prefix[i]`` is the index of the prefix that the i-th row's own tokens continue.
    """

    prefix_lengths: tuple[int, ...]
    own_lengths: tuple[int, ...]
    row_prefix: tuple[int, ...]


@dataclass(frozen=True)
class ForwardInputs:
    """Model inputs for some of the rows, and where their action tokens are.

    ``input_ids`` and ``position_ids`` are [b, t] ([1, N] when packed). Action token i has the id ``targets[i]``, is
    predicted by the hidden state ``predictors[i]`` of the flattened [b * t], and stands at ``destinations[i]`` of the
    flattened [B * T] batch. ``segments`` describes a packed row, ``attention_mask`` [b, t] padded rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    destinations: Tensor
    segments: Segments | None = None
    attention_mask: Tensor | None = None


class RowPlan:
    """Which tokens of each row the model must see, and which of them it can share with other rows.

    A row is fed up to the token before its last action token: later tokens predict nothing that is asked for. Rows
    without any action token are not fed at all. The rows of a group share their longest common prefix, limited to
    what stands before the first action token of any of them.

    Args:
        token_ids: [B, T] int64, rows padded on the right.
        action_mask: [B, T] bool; column 0 is False.
        prefix_groups: [B] labels, or None when no row shares its prefix.
    """

    def __init__(self, token_ids: Tensor, action_mask: Tensor, prefix_groups: Tensor | None) -> None:
        self.token_ids = token_ids.cpu()
        self.action_mask = action_mask.cpu()
        T = self.token_ids.shape[1]
        columns = torch.arange(T)
        self.fed_lengths: list[int] = (self.action_mask * columns).amax(1).tolist()
        active = [row for row, fed in enumerate(self.fed_lengths) if fed]
        if prefix_groups is None:
            self.groups = [[row] for row in active]
        else:
            members: dict[int, list[int]] = {}
            labels = prefix_groups.tolist()
            for row in active:
                members.setdefault(labels[row], []).append(row)
            self.groups = list(members.values())
        self._prefix_lengths = self._common_prefix_lengths()

    def _common_prefix_lengths(self) -> list[int]:
        """Length of the prefix that each group shares; 0 for a group of one."""
        B, T = self.token_ids.shape
        reference = torch.arange(B)
        for rows in self.groups:
            reference[rows] = rows[0]
        differs = self.token_ids != self.token_ids[reference]
        # the first column that differs or is an action token ends the prefix
        ends = differs | self.action_mask
        first_end = torch.where(ends.any(1), ends.int().argmax(1), T).tolist()
        return [min(first_end[row] for row in rows) if len(rows) > 1 else 0 for rows in self.groups]

    def packed_chunks(self, max_tokens: int | None) -> list[list[list[int]]]:
        """Groups of row indices per chunk, each chunk at most ``max_tokens`` packed tokens where rows allow it.

        A group stays together unless it alone exceeds the budget; then it is split and each part computes the prefix.
        A single row longer than the budget makes a chunk of its own.
        """
        if max_tokens is None:
            return [self.groups] if self.groups else []
        units: list[tuple[int, list[int]]] = []
        for rows, prefix in zip(self.groups, self._prefix_lengths, strict=True):
            part: list[int] = []
            cost = prefix
            for row in rows:
                own = self.fed_lengths[row] - prefix
                if part and cost + own > max_tokens:
                    units.append((cost, part))
                    part, cost = [], prefix
                part.append(row)
                cost += own
            units.append((cost, part))
        # neighbours of similar length waste the least padding inside the attention
        units.sort(key=lambda unit: -max(self.fed_lengths[row] for row in unit[1]))
        return _fill_chunks(units, max_tokens)

    def padded_chunks(self, max_tokens: int | None) -> list[list[int]]:
        """Row indices per chunk, longest rows first, each chunk at most ``max_tokens`` with padding or a single row."""
        rows = sorted((row for group in self.groups for row in group), key=lambda row: -self.fed_lengths[row])
        if max_tokens is None:
            return [rows] if rows else []
        chunks: list[list[int]] = []
        for row in rows:
            if chunks and (len(chunks[-1]) + 1) * self.fed_lengths[chunks[-1][0]] <= max_tokens:
                chunks[-1].append(row)
            else:
                chunks.append([row])
        return chunks

    def pack(self, groups: Sequence[Sequence[int]], device: torch.device) -> ForwardInputs:
        """One packed row: the prefix of each of these groups, then the own tokens of each of their rows."""
        shared = {row: prefix for rows, prefix in zip(self.groups, self._prefix_lengths, strict=True) for row in rows}
        prefix_lengths = [shared[rows[0]] if len(rows) > 1 else 0 for rows in groups]
        row_prefix = [index for index, rows in enumerate(groups) for _ in rows]
        rows = [row for members in groups for row in members]
        row_index = torch.tensor(rows)
        columns = torch.arange(self.token_ids.shape[1])
        prefix_of_group = torch.tensor(prefix_lengths)
        prefix_of_row = prefix_of_group[row_prefix]
        fed = torch.tensor([self.fed_lengths[row] for row in rows])

        in_prefix = columns < prefix_of_group[:, None]
        in_own = (columns >= prefix_of_row[:, None]) & (columns < fed[:, None])
        tokens = self.token_ids[row_index]
        leaders = self.token_ids[[members[0] for members in groups]]
        prefix_positions = in_prefix.nonzero()[:, 1]
        own_positions = in_own.nonzero()[:, 1]

        own_lengths = fed - prefix_of_row
        prefix_starts = prefix_of_group.cumsum(0) - prefix_of_group
        own_starts = own_lengths.cumsum(0) - own_lengths + int(prefix_of_group.sum())
        action_row, action_column = self.action_mask[row_index].nonzero(as_tuple=True)
        position = action_column - 1
        start, prefix = own_starts[action_row], prefix_of_row[action_row]
        predictors = torch.where(
            position < prefix, prefix_starts[row_prefix][action_row] + position, start + position - prefix
        )
        return ForwardInputs(
            input_ids=torch.cat([leaders[in_prefix], tokens[in_own]])[None].to(device),
            position_ids=torch.cat([prefix_positions, own_positions])[None].to(device),
            predictors=predictors.to(device),
            targets=tokens[action_row, action_column].to(device),
            destinations=(row_index[action_row] * len(columns) + action_column).to(device),
            segments=Segments(tuple(prefix_lengths), tuple(own_lengths.tolist()), tuple(row_prefix)),
        )

    def pad(self, rows: Sequence[int], device: torch.device) -> ForwardInputs:
        """These rows padded on the right to the longest fed length among them; the padding repeats token 0."""
        row_index = torch.tensor(rows)
        fed = torch.tensor([self.fed_lengths[row] for row in rows])
        width = int(fed.max())
        columns = torch.arange(width)
        tokens = self.token_ids[row_index]
        action_row, action_column = self.action_mask[row_index].nonzero(as_tuple=True)
        return ForwardInputs(
            input_ids=tokens[:, :width].where(columns < fed[:, None], 0).to(device),
            position_ids=columns.expand(len(rows), width).to(device),
            predictors=(action_row * width + action_column - 1).to(device),
            targets=tokens[action_row, action_column].to(device),
            destinations=(row_index[action_row] * self.token_ids.shape[1] + action_column).to(device),
            attention_mask=(columns < fed[:, None]).to(device),
        )


def _fill_chunks(units: list[tuple[int, list[int]]], max_tokens: int) -> list[list[list[int]]]:
    """Units of (cost, rows) put into chunks in order, each chunk filled up to the budget."""
    chunks: list[list[list[int]]] = []
    filled = 0
    for cost, rows in units:
        if chunks and filled + cost <= max_tokens:
            chunks[-1].append(rows)
            filled += cost
        else:
            chunks.append([rows])
            filled = cost
    return chunks
