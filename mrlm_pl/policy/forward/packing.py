"""The layout of a batch's rows for the model: packed, with common beginnings once, or padded; in micro-batches.

All arithmetic here is on the host: the layout decides shapes, so it must be known before a kernel starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.policy.forward.devices import on_device, padded_tokens
from mrlm_pl.policy.forward.row_tree import RowTree, Segment


class TokenRows(NamedTuple):
    """Rows whose action tokens a forward pass evaluates; on the host, where the layout of the pass is decided.

    Attributes:
        token_ids: [B, T] int64, padded on the right.
        lengths: [B], number of real tokens of each row.
        action_mask: [B, T] bool, True where the policy sampled the token.
        temperature: [B] temperatures of the sampler, above 0; None: 1.
        prefix_groups: [B] group labels; rows with the same label compute common beginnings once. They change the work,
            never the values.
    """

    token_ids: Tensor
    lengths: Tensor
    action_mask: Tensor
    temperature: Tensor | None = None
    prefix_groups: Tensor | None = None

    def select(self, rows: Tensor) -> TokenRows:
        """Return the rows [b] with the given indices."""
        return self._replace(**{name: value[rows] for name, value in self._asdict().items() if value is not None})

    def check(self) -> None:
        """Raise ValueError for inconsistent rows."""
        if self.token_ids.dim() != 2 or 0 in self.token_ids.shape:
            shape = tuple(self.token_ids.shape)
            raise ValueError(f"token_ids has shape {shape}, but must be [B, T] with at least one token")
        (B, T), mask = self.token_ids.shape, self.action_mask
        if mask.shape != (B, T) or mask.dtype != torch.bool:
            raise ValueError(f"action_mask is {mask.dtype} {tuple(mask.shape)}, but must be bool [{B}, {T}]")
        for name in ("lengths", "prefix_groups", "temperature"):
            value = getattr(self, name)
            if value is not None and value.shape != (B,):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, but must be [{B}]: one value per row")
        mask, ends = mask.cpu(), self.lengths.cpu()
        if mask[:, 0].any():
            rows = mask[:, 0].nonzero().flatten().tolist()
            raise ValueError(
                f"action_mask[:, 0] is True in rows {rows}: nothing comes before a row's first token, so it has no "
                "log-probability; start every row with a prompt or a beginning-of-sequence token"
            )
        padding = (torch.arange(T) >= ends[:, None]) & mask
        if padding.any():
            rows = padding.any(1).nonzero().flatten().tolist()
            fault = f"action_mask is True at or after lengths in rows {rows}"
            raise ValueError(f"{fault}: padding cannot be an action token")


@dataclass(frozen=True)
class Segments:
    """The segments of a packed row, level by level; each continues a chain of segments of earlier levels.

    Attributes:
        lengths: length of each segment, by level. The last level holds the rows' own tokens.
        ancestors: index of the ancestor of each segment at each earlier level of its chain, or -1, by level.
    """

    lengths: tuple[tuple[int, ...], ...]
    ancestors: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass over some of the rows: the model's inputs, and the places of their action tokens, on the host.

    ``input_ids`` and ``position_ids`` are [b, t] ([1, N] when packed). Action token i has the id ``targets[i]``, is
    predicted by the hidden state ``predictors[i]`` of the flattened [b * t], and goes to ``destinations[i]`` of the
    flattened [B * T] batch. ``segments`` describes a packed row, whose tokens behind them are padding;
    ``attention_mask`` [b, t] padded rows.
    ``temperature`` is that of each action token [n], or None for 1.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    destinations: Tensor
    segments: Segments | None = None
    attention_mask: Tensor | None = None
    temperature: Tensor | None = None

    def padded(self, device: torch.device, dtype: torch.dtype) -> ForwardPass:
        """Return a packed pass with padding behind its segments, up to its number of :func:`padded_tokens`."""
        count = self.input_ids.numel()
        padding = 0, padded_tokens(count, device, dtype) - count
        return replace(self, input_ids=F.pad(self.input_ids, padding), position_ids=F.pad(self.position_ids, padding))

    def to(self, device: torch.device | str) -> ForwardPass:
        """Return a copy on another device; the host does not wait for the device."""
        tensors: dict[str, Any] = {
            name: on_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def padded_chunks(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Return the rows of each chunk, longest first: at most ``max_tokens`` with padding, or a single row.

    Rows of length 0 are left out.

    >>> padded_chunks([3, 9, 0, 2, 10], 20)
    [[4, 1], [0, 3]]
    """
    chunks: list[list[int]] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        if chunks and (max_tokens is None or (len(chunks[-1]) + 1) * lengths[chunks[-1][0]] <= max_tokens):
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


class RowPlan:
    """The tokens of each row that the model must see, and those that rows share.

    A row is fed up to the token before its last action token: later tokens predict no action. Rows without action
    tokens are not fed. Rows with the same label compute their common beginning once, including actions in it.

    Args:
        token_ids: [B, T] int64, rows padded on the right.
        action_mask: [B, T] bool; column 0 is False.
        prefix_groups: [B] group labels, or None if no row shares its prefix.
    """

    def __init__(self, token_ids: Tensor, action_mask: Tensor, prefix_groups: Tensor | None) -> None:
        self.token_ids = token_ids.cpu()
        self.action_mask = action_mask.cpu()
        columns = torch.arange(self.token_ids.shape[1])
        self.fed_lengths: list[int] = (self.action_mask * columns).amax(1).tolist()
        self._labels = prefix_groups

    def sides(self, boundary: int | None) -> list[RowPlan]:
        """Return plans for the actions with at most, and with more than, ``boundary`` tokens before them, unless empty.

        Within a plan no row, or every row, is fed more than ``boundary`` tokens. None: all in one plan.
        """
        if boundary is None:
            return [self]
        near = torch.arange(self.action_mask.shape[1]) <= boundary
        masks = (self.action_mask & near, self.action_mask & ~near)
        return [RowPlan(self.token_ids, mask, self._labels) for mask in masks if mask.any()]

    def packed(self, max_tokens: int | None) -> list[ForwardPass]:
        """Return the rows as packed rows of at most ``max_tokens`` tokens, or a single longer one each."""
        tree = RowTree.of(self.token_ids, self.fed_lengths, self._labels)
        return [self._pack(tree, leaves) for leaves in tree.chunks(max_tokens)]

    def _pack(self, tree: RowTree, leaves: range) -> ForwardPass:
        """Return one packed row: the shared segments of these leaves, level by level, then each leaf's own tokens."""
        shared, own = tree.segments(leaves)
        levels = [*shared, own]
        segments = [segment for level in levels for segment in level]
        start, stop = (torch.tensor([getattr(segment, name) for segment in segments]) for name in ("start", "stop"))
        length = stop - start
        offset = length.cumsum(0) - length
        position_ids = torch.arange(int(length.sum())) + (start - offset).repeat_interleave(length)
        leaders = torch.tensor([tree.rows[segment.leaf][0] for segment in segments])

        rows = torch.tensor([row for leaf in leaves for row in tree.rows[leaf]])
        leaf_index = torch.arange(len(leaves)).repeat_interleave(
            torch.tensor([len(tree.rows[leaf]) for leaf in leaves])
        )
        action_row, action_column = self.action_mask[rows].nonzero(as_tuple=True)
        token = rows[action_row], action_column
        layout = _layout(levels)
        return ForwardPass(
            input_ids=self.token_ids[leaders.repeat_interleave(length), position_ids][None],
            position_ids=position_ids[None],
            predictors=_places(layout, stop, offset - start, leaf_index[action_row], action_column - 1),
            targets=self.token_ids[token],
            destinations=(token[0] * self.token_ids.shape[1] + action_column),
            segments=layout,
        )

    def pad(self, rows: Sequence[int]) -> ForwardPass:
        """Return these rows padded on the right, with token 0, to their longest fed length."""
        row_index = torch.tensor(rows)
        fed = torch.tensor([self.fed_lengths[row] for row in rows])
        width = int(fed.max())
        columns = torch.arange(width)
        tokens = self.token_ids[row_index]
        action_row, action_column = self.action_mask[row_index].nonzero(as_tuple=True)
        return ForwardPass(
            input_ids=tokens[:, :width].where(columns < fed[:, None], 0),
            position_ids=columns.expand(len(rows), width),
            predictors=(action_row * width + action_column - 1),
            targets=tokens[action_row, action_column],
            destinations=(row_index[action_row] * self.token_ids.shape[1] + action_column),
            attention_mask=(columns < fed[:, None]),
        )


def _layout(levels: Sequence[Sequence[Segment]]) -> Segments:
    return Segments(
        tuple(tuple(segment.stop - segment.start for segment in level) for level in levels),
        tuple(
            tuple((*segment.chain, *[-1] * (depth - len(segment.chain))) for segment in level)
            for depth, level in enumerate(levels)
        ),
    )


def _places(segments: Segments, stop: Tensor, shift: Tensor, leaf: Tensor, position: Tensor) -> Tensor:
    """Return the places in the packed row [n] of the tokens at these positions [n] of the n-th leaves.

    Args:
        segments: segments of the packed row; the last level holds the leaves.
        stop: [segments], end of each segment.
        shift: [segments], offset from a position in the segment to the packed row.
    """
    first = [0, *itertools.accumulate(map(len, segments.lengths))]
    numbers = torch.tensor(
        [
            [
                *(first[level] + ancestor if ancestor >= 0 else -1 for level, ancestor in enumerate(chain)),
                first[-2] + number,
            ]
            for number, chain in enumerate(segments.ancestors[-1])
        ]
    )
    ends = torch.where(numbers >= 0, stop[numbers], 0)
    depth = (ends[leaf].cummax(1).values <= position[:, None]).sum(1)
    return position + shift[numbers[leaf, depth]]
