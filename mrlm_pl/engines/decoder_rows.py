"""The rows that a fused decoder generates: each context's keys and values once, each row's own beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrlm_pl.engines.backend import Rows

if TYPE_CHECKING:
    from mrlm_pl.engines.decoder import FusedDecoder

_GROWTH = 64


class DecoderRows(Rows):
    """Rows of a :class:`~mrlm_pl.engines.decoder.FusedDecoder`.

    The keys and values of a context are held, and read in every step, once for all its rows. Those of the tokens fed
    since then are a tensor ``[layers, 2, B, KV heads, capacity, head size]`` of the rows: as all rows have been fed
    the same number of tokens, they are written to one column and need no mask.

    Args:
        decoder: the weights and the arithmetic.
        shared: keys and values of the contexts, left-aligned, shape ``[layers, 2, U, KV heads, T, head size]``.
        lengths: number of tokens of each context.
        rows: number of rows of each context.
        reserve: tokens that will be appended at most.
    """

    def __init__(
        self, decoder: FusedDecoder, shared: Tensor, lengths: Sequence[int], rows: Sequence[int], reserve: int
    ) -> None:
        self._decoder = decoder
        self._shared = shared
        self._lengths = list(lengths)
        self._contexts = [u for u, count in enumerate(rows) for _ in range(count)]
        self._fed = 0
        self._own = self._empty(len(self._contexts), max(1, min(reserve, _GROWTH)))
        self._arrange()

    def _empty(self, rows: int, capacity: int) -> Tensor:
        layers, pair, _, heads, _, size = self._shared.shape
        return self._shared.new_zeros(layers, pair, rows, heads, capacity, size)

    def _arrange(self) -> None:
        """Recompute what depends on which rows and contexts there are."""
        device = self._shared.device
        counts = [self._contexts.count(u) for u in range(len(self._lengths))]
        self._width = max(counts)
        seen = [0] * len(counts)
        slots = []
        for u in self._contexts:
            slots.append(u * self._width + seen[u])
            seen[u] += 1
        full = len(slots) == len(counts) * self._width
        self._slots = None if full else torch.tensor(slots, device=device)
        lengths = torch.tensor(self._lengths, device=device)
        self._mask: Tensor | None = None
        if min(self._lengths) < self._shared.shape[4]:
            hidden = torch.arange(self._shared.shape[4], device=device) >= lengths[:, None, None, None]
            self._mask = self._shared.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        self._equal = len(set(self._lengths)) == 1
        self._context_length = lengths[torch.tensor(self._contexts, device=device)]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        if self._fed == self._own.shape[4]:
            grown = self._empty(len(self._contexts), self._fed + max(_GROWTH, self._fed // 2))
            grown[..., : self._fed, :] = self._own
            self._own = grown
        cos, sin = self._decoder.rotation(max(self._lengths) + self._fed + 1)
        if self._equal:
            position = self._lengths[0] + self._fed
            cos, sin = cos[position], sin[position]
        else:
            positions = self._context_length + self._fed
            cos, sin = cos[positions][:, None], sin[positions][:, None]
        x = self._decoder.hidden(tokens, cos, sin, self._attend)
        self._fed += 1
        return self._decoder.logits(x)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one new token per row over its context and its own tokens, ``[B, heads, head size]``.

        The query heads of a group take the place of query positions, so keys and values are not repeated.
        """
        w = self._decoder.weights
        keys, values = self._own[i]
        shared_keys, shared_values = self._shared[i]
        keys.select(2, self._fed).copy_(k)
        values.select(2, self._fed).copy_(v)
        q = q.reshape(len(q), w.kv_heads, w.heads // w.kv_heads, w.head_dim) * w.scale
        context_scores = torch.matmul(self._by_context(q), shared_keys.transpose(-1, -2))
        if self._mask is not None:
            context_scores += self._mask
        own_scores = torch.matmul(q, keys[:, :, : self._fed + 1].transpose(-1, -2))
        scores = torch.cat((self._by_row(context_scores), own_scores), -1)
        shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        length = shared_keys.shape[2]
        own = torch.matmul(shares[..., length:], values[:, :, : self._fed + 1])
        return own + self._by_row(torch.matmul(self._by_context(shares[..., :length]), shared_values))

    def _by_context(self, x: Tensor) -> Tensor:
        """``[B, KV heads, group, N]`` of rows as ``[U, KV heads, rows of a context * group, N]``.

        What belongs to the rows of a context stands side by side, so that its keys and values are read once.
        """
        _, heads, group, size = x.shape
        if self._slots is not None:
            x = x.new_zeros(len(self._lengths) * self._width, heads, group, size).index_copy_(0, self._slots, x)
        return x.reshape(-1, self._width, heads, group, size).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`_by_context`."""
        contexts, heads, _, size = x.shape
        x = x.view(contexts, heads, self._width, -1, size).transpose(1, 2).flatten(0, 1)
        return x if self._slots is None else x[self._slots]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``, and the contexts that have none left."""
        device = self._shared.device
        self._own = self._own[:, :, torch.tensor(rows, device=device)]
        contexts = [self._contexts[b] for b in rows]
        left = sorted(set(contexts))
        if len(left) < len(self._lengths):
            self._lengths = [self._lengths[u] for u in left]
            self._shared = self._shared[:, :, torch.tensor(left, device=device), :, : max(self._lengths)]
        self._contexts = [left.index(u) for u in contexts]
        self._arrange()

    def states(self, row: int, length: int) -> Tensor:
        """A copy of the keys and values of a row's first ``length`` tokens."""
        context = self._contexts[row]
        own = length - self._lengths[context]
        first = self._shared[:, :, context, :, : self._lengths[context]]
        return torch.cat((first, self._own[:, :, row, :, :own]), dim=3)
