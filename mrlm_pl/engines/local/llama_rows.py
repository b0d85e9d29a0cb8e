"""Rows of a Llama-like decoder in generation: attention over a shared context and the tokens fed since then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.engines.local.decoder import Decoder
from mrlm_pl.engines.local.generation import Rows
from mrlm_pl.policy.forward.devices import on_device

_GROWTH = 64


class ContextRows(Rows):
    """Rows that continue contexts, whose keys and values their decoder computes.

    A context is held once for all its rows.

    Attributes:
        shared: zeros for the keys and values of the contexts, left-aligned, ``[layers, 2, U, KV heads, T, head size]``.
    """

    shared: Tensor
    _own: Tensor  # of the tokens fed since then, [layers, 2, B, KV heads, capacity, head size]
    _lengths: list[int]  # of each context
    _contexts: list[int]  # of each row

    def states(self, row: int, length: int) -> Tensor:
        """Return a copy of the keys and values of a row's first ``length`` tokens."""
        context = self._contexts[row]
        own = length - self._lengths[context]
        first = self.shared[:, :, context, :, : self._lengths[context]]
        return torch.cat((first, self._own[:, :, row, :, :own]), dim=3)


class Seen(NamedTuple):
    """Keys and values ``[N, KV heads, T, head size]``, and the mask that is added to their scores, if any."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None


def attention(
    q: Tensor,
    context: Seen,
    own: Seen,
    by_context: Callable[[Tensor], Tensor],
    by_row: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the attention ``[B, KV heads, group, head size]`` of scaled queries to their contexts and own tokens.

    The query heads of a group take the place of query positions, so keys and values are not repeated. ``by_context``
    puts the rows of a context side by side, so that its keys and values are read once; ``by_row`` is its inverse.
    """
    context_scores = torch.matmul(by_context(q), context.keys.transpose(-1, -2))
    if context.mask is not None:
        context_scores += context.mask
    own_scores = torch.matmul(q, own.keys.transpose(-1, -2))
    if own.mask is not None:
        own_scores += own.mask
    scores = torch.cat((by_row(context_scores), own_scores), -1)
    shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    length = context.keys.shape[2]
    of_own = torch.matmul(shares[..., length:], own.values)
    return of_own + by_row(torch.matmul(by_context(shares[..., :length]), context.values))


def hidden_beyond(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return minus infinity at the columns from each length ``[U]`` on, else 0, ``[U, 1, 1, width]``."""
    hidden = torch.arange(width, device=lengths.device) >= lengths[:, None, None, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=lengths.device).masked_fill_(hidden, float("-inf"))


def places_in_contexts(contexts: Sequence[int], width: int) -> list[int]:
    """Return each row's place in a table ``[U, width]`` of contexts.

    >>> places_in_contexts([0, 0, 2], 2)
    [0, 1, 4]
    """
    seen: dict[int, int] = {}
    places = []
    for context in contexts:
        places.append(context * width + seen.get(context, 0))
        seen[context] = seen.get(context, 0) + 1
    return places


class DecoderRows(ContextRows):
    """Rows of a :class:`~mrlm_pl.engines.local.llama.FusedDecoder`, in tensors as small as possible.

    The keys and values of a context are held, and read in every step, once for all its rows. Those of the tokens fed
    since then are a tensor ``[layers, 2, B, KV heads, capacity, head size]`` of the rows: as all rows have been fed
    the same number of tokens, they are written to one column and need no mask. Where :meth:`Decoder.rounded` rounds up,
    lengths are padded, and the last row is repeated.

    Args:
        decoder: the weights and the arithmetic.
        lengths: number of tokens of each context.
        rows: number of rows of each context.
        reserve: most tokens to append.
    """

    def __init__(self, decoder: Decoder, lengths: Sequence[int], rows: Sequence[int], reserve: int) -> None:
        w = decoder.weights
        self._decoder = decoder
        shape = (len(w.layers), 2, len(lengths), w.kv_heads, decoder.rounded(max(lengths)), w.head_dim)
        self.shared = torch.zeros(shape, dtype=decoder.attention_dtype, device=decoder.device)
        self._lengths = list(lengths)
        self._contexts = [u for u, count in enumerate(rows) for _ in range(count)]
        self._fed = self._end = 0
        self._own_mask: Tensor | None = None
        self._own = self._empty(len(self._contexts), max(1, min(reserve, _GROWTH)))
        self._arrange()

    def _empty(self, rows: int, capacity: int) -> Tensor:
        layers, pair, _, heads, _, size = self.shared.shape
        return self.shared.new_zeros(layers, pair, rows, heads, self._decoder.rounded(capacity), size)

    def _arrange(self) -> None:
        """Recompute the tensors that depend on the rows and contexts."""
        device = self.shared.device
        contexts = len(self._lengths)
        self._width = self._decoder.rounded(max(self._contexts.count(u) for u in range(contexts)))
        places = places_in_contexts(self._contexts, self._width)
        full = len(places) == contexts * self._width
        self._places = None if full else on_device(places, device)
        lengths = on_device(self._lengths, device)
        self._mask: Tensor | None = None
        if min(self._lengths) < self.shared.shape[4]:
            self._mask = hidden_beyond(lengths, self.shared.shape[4], self.shared.dtype)
        self._equal = len(set(self._lengths)) == 1
        self._context_length = lengths[on_device(self._contexts, device)]

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        if self._fed == self._own.shape[4]:
            grown = self._empty(len(self._contexts), self._fed + max(_GROWTH, self._fed // 2))
            grown[..., : self._fed, :] = self._own
            self._own = grown
        count = len(tokens)
        tokens = F.pad(tokens, (0, len(self._contexts) - count))
        self._end, self._own_mask = self._decoder.rounded(self._fed + 1), None
        if self._end > self._fed + 1:
            of_all = on_device([self._fed + 1], self.shared.device)
            self._own_mask = hidden_beyond(of_all, self._end, self.shared.dtype)
        cos, sin = self._decoder.rotation(max(self._lengths) + self._fed + 1)
        if self._equal:
            position = self._lengths[0] + self._fed
            cos, sin = cos[position], sin[position]
        else:
            positions = self._context_length + self._fed
            cos, sin = cos[positions][:, None], sin[positions][:, None]
        x = self._decoder.hidden(tokens, cos, sin, self._attend)
        self._fed += 1
        return self._decoder.logits(x)[:count]

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of one new token per row over its context and its own tokens, ``[B, heads, head size]``.

        Its keys and values are written to their column first.
        """
        keys, values = self._own[i]
        keys.select(2, self._fed).copy_(k)
        values.select(2, self._fed).copy_(v)
        own = Seen(keys[:, :, : self._end], values[:, :, : self._end], self._own_mask)
        context = Seen(self.shared[i, 0], self.shared[i, 1], self._mask)
        return attention(self._decoder.grouped_queries(q), context, own, self._by_context, self._by_row)

    def _by_context(self, x: Tensor) -> Tensor:
        """Return ``[B, KV heads, group, N]`` of rows as ``[U, KV heads, rows of a context * group, N]``."""
        _, heads, group, size = x.shape
        if self._places is not None:
            x = x.new_zeros(len(self._lengths) * self._width, heads, group, size).index_copy_(0, self._places, x)
        return x.reshape(-1, self._width, heads, group, size).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """Return the inverse of :meth:`_by_context`."""
        x = x.unflatten(2, (self._width, -1)).transpose(1, 2).flatten(0, 1)
        return x if self._places is None else x[self._places]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``, and contexts without rows."""
        device = self.shared.device
        rows = [*rows, *[rows[-1]] * (self._decoder.rounded(len(rows)) - len(rows))]
        self._own = self._own[:, :, on_device(rows, device)]
        contexts = [self._contexts[b] for b in rows]
        left = sorted(set(contexts))
        if len(left) < len(self._lengths):
            self._lengths = [self._lengths[u] for u in left]
            longest = self._decoder.rounded(max(self._lengths))
            self.shared = self.shared[:, :, on_device(left, device), :, :longest]
        self._contexts = [left.index(u) for u in contexts]
        self._arrange()
