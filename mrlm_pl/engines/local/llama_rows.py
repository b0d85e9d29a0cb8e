"""Rows of a Llama-like decoder in generation: attention over a shared context and the tokens fed since then."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.engines.local.decoder import Decoder
from mrlm_pl.engines.local.generation import Rows, States
from mrlm_pl.policy.forward.devices import on_device

_GROWTH = 64


class ContextRows(Rows):
    """Rows that continue contexts, whose keys and values their decoder computes.

    A context is held once for all its rows.

    Args:
        lengths: number of tokens of each context.
        rows: number of rows of each context.

    Attributes:
        shared: zeros for the keys and values of the contexts, left-aligned, ``[layers, 2, U, KV heads, T, head size]``.
    """

    shared: Tensor
    _own: Tensor  # of the tokens fed since then, [layers, 2, B, KV heads, capacity, head size]

    def __init__(self, lengths: Sequence[int], rows: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._contexts = [u for u, count in enumerate(rows) for _ in range(count)]  # of each row
        self._copies: list[Tensor | None] = [None] * len(lengths)  # of the contexts whose rows were copied
        self._fed = 0

    def states(self, row: int, length: int) -> States:
        """Return copies of the keys and values of a row's first ``length`` tokens: of its context, and of its own."""
        context = self._contexts[row]
        context_length = self._lengths[context]
        copy = self._copies[context]
        if copy is None:
            copy = self._copies[context] = self.shared[:, :, context, :, :context_length].clone()
        return States((copy, self._own[:, :, row, :, : length - context_length].clone()))

    def _keep_contexts(self, contexts: Sequence[int]) -> None:
        """Keep these contexts alone, and number them from 0 again."""
        self._lengths = [self._lengths[u] for u in contexts]
        self._copies = [self._copies[u] for u in contexts]
        self._contexts = [contexts.index(u) for u in self._contexts]


def hidden_beyond(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return minus infinity at the columns from each length ``[U]`` on, else 0, ``[U, 1, 1, width]``."""
    hidden = torch.arange(width, device=lengths.device) >= lengths[:, None, None, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=lengths.device).masked_fill_(hidden, float("-inf"))


def places_in_contexts(contexts: Sequence[int], width: int) -> list[int]:
    """Return each row's place in a table ``[U, width]`` of contexts.

    >>> places_in_contexts([0, 0, 2], 2)
    [0, 1, 4]
    """
    numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
    return [context * width + next(numbers[context]) for context in contexts]


class DecoderRows(ContextRows):
    """Rows of a :class:`~mrlm_pl.engines.local.llama.FusedDecoder`, in tensors as small as possible.

    The keys and values of a context are held, and read in every step, once for all its rows. Those of the tokens fed
    since then are a tensor with room for some more: as all rows have been fed the same number of tokens, they are
    written to one column and need no mask. In memory KV heads come before contexts and rows, so that the rows of a
    context are adjacent in each head, and products over contexts and over rows read the same tensors. Where
    :meth:`Decoder.rounded` rounds up, lengths are padded, and the last row is repeated.

    Args:
        decoder: the weights and the arithmetic.
        lengths: number of tokens of each context.
        rows: number of rows of each context.
        reserve: maximum number of tokens to append.
    """

    def __init__(self, decoder: Decoder, lengths: Sequence[int], rows: Sequence[int], reserve: int) -> None:
        super().__init__(lengths, rows)
        self._decoder = decoder
        self.shared = self._zeros(len(lengths), max(lengths))
        self._end = 0
        self._own_mask: Tensor | None = None
        self._own = self._zeros(len(self._contexts), max(1, min(reserve, _GROWTH)))
        self._arrange()

    def _zeros(self, count: int, length: int) -> Tensor:
        """Return zeros ``[layers, 2, count, KV heads, rounded length, head size]``, in memory with KV heads first."""
        decoder, w = self._decoder, self._decoder.weights.sizes
        shape = (len(decoder.weights.layers), 2, w.kv_heads, count, decoder.rounded(length), w.head_dim)
        return torch.zeros(shape, dtype=decoder.attention_dtype, device=decoder.device).transpose(2, 3)

    def _arrange(self) -> None:
        """Recompute the tensors that depend on the rows and contexts."""
        device = self.shared.device
        contexts = len(self._lengths)
        self._width = self._decoder.rounded(max(self._contexts.count(u) for u in range(contexts)))
        places = places_in_contexts(self._contexts, self._width)
        self._places = None if len(places) == contexts * self._width else on_device(places, device)
        lengths = on_device(self._lengths, device)
        self._mask: Tensor | None = None
        if min(self._lengths) < self.shared.shape[4]:
            self._mask = hidden_beyond(lengths, self.shared.shape[4], self.shared.dtype)
        self._equal = len(set(self._lengths)) == 1
        self._context_length = lengths[on_device(self._contexts, device)]
        w, rows = self._decoder.weights.sizes, len(self._contexts)
        self._q = self.shared.new_empty(w.kv_heads, rows, w.heads // w.kv_heads, w.head_dim)
        self._mixed = self.shared.new_empty(rows, w.heads, w.head_dim)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        if self._fed == self._own.shape[4]:
            grown = self._zeros(len(self._contexts), self._fed + max(_GROWTH, self._fed // 2))
            grown[..., : self._fed, :] = self._own
            self._own = grown
        count, padding = tokens.shape[0], len(self._contexts) - tokens.shape[0]
        tokens = F.pad(tokens, (0, padding)) if padding else tokens
        self._end, self._own_mask = self._decoder.rounded(self._fed + 1), None
        if self._end > self._fed + 1:
            of_all = on_device([self._fed + 1], self.shared.device)
            self._own_mask = hidden_beyond(of_all, self._end, self.shared.dtype)[0]
        cos, sin = self._decoder.rotation(max(self._lengths) + self._fed + 1)
        if self._equal:
            position = self._lengths[0] + self._fed
            cos, sin = cos[position], sin[position]
        else:
            positions = self._context_length + self._fed
            cos, sin = cos[positions][:, None], sin[positions][:, None]
        x = self._hidden(tokens, cos, sin)
        self._fed += 1
        logits = self._decoder.logits(x)
        return logits[:count] if padding else logits

    def _hidden(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream ``[B, hidden size]`` after the last layer; see :meth:`Decoder.hidden`."""
        return self._decoder.hidden(tokens, cos, sin, self.attend)

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of one new token per row over its context and its own tokens, ``[B, heads, head size]``.

        Its keys and values are written to their column first. The query heads of a group take the place of query
        positions, so keys and values are not repeated. The next layer overwrites the result.
        """
        kv_heads, rows, group, size = self._q.shape
        own_states = self._own[i].transpose(1, 2)
        own_states[0, :, :, self._fed].copy_(k.transpose(0, 1))
        own_states[1, :, :, self._fed].copy_(v.transpose(0, 1))
        keys, values = own_states[..., : self._end, :].flatten(1, 2)
        context_keys, context_values = self.shared[i].transpose(1, 2).flatten(1, 2)
        grouped = q.unflatten(1, (kv_heads, group)).transpose(0, 1)
        torch.mul(grouped, self._decoder.weights.sizes.scale, out=self._q)
        length = context_keys.shape[1]
        of_context = torch.bmm(self._by_context(self._q), context_keys.transpose(1, 2))
        if self._mask is not None:
            of_context.view(kv_heads, -1, *of_context.shape[1:]).add_(self._mask[:, 0])
        of_own = torch.bmm(self._q.flatten(0, 1), keys.transpose(1, 2))
        if self._own_mask is not None:
            of_own += self._own_mask
        scores = torch.cat((self._by_row(of_context), of_own), -1)
        shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.bmm(shares[..., length:], values).view(self._q.shape)
        shares = shares.unflatten(0, (kv_heads, rows))[..., :length]
        of_context = self._by_row(torch.bmm(self._by_context(shares), context_values)).view(self._q.shape)
        torch.add(mixed.transpose(0, 1), of_context.transpose(0, 1), out=self._mixed.view(rows, kv_heads, group, size))
        return self._mixed

    def _by_context(self, x: Tensor) -> Tensor:
        """Return ``[KV heads, B, group, N]`` of rows as ``[KV heads * U, rows of a context * group, N]``."""
        if self._places is not None:
            table = x.new_zeros(len(x), len(self._lengths) * self._width, *x.shape[2:])
            x = table.index_copy_(1, self._places, x)
        return x.view(-1, self._width * x.shape[2], x.shape[3])

    def _by_row(self, x: Tensor) -> Tensor:
        """Return the inverse of :meth:`_by_context`, as ``[KV heads * B, group, N]``."""
        kv_heads, _, group, _ = self._q.shape
        if self._places is not None:
            x = x.view(kv_heads, -1, group, x.shape[-1]).index_select(1, self._places)
        return x.view(-1, group, x.shape[-1])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``, and contexts without rows."""
        rows = [*rows, *[rows[-1]] * (self._decoder.rounded(len(rows)) - len(rows))]
        self._own = _select_rows(self._own, rows)
        self._contexts = [self._contexts[b] for b in rows]
        contexts_left = sorted(set(self._contexts))
        if len(contexts_left) < len(self._lengths):
            self._keep_contexts(contexts_left)
            self.shared = _select_rows(self.shared[..., : self._decoder.rounded(max(self._lengths)), :], contexts_left)
        self._arrange()


def _select_rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows of ``[layers, 2, N, KV heads, T, head size]``, in memory with KV heads first."""
    return states.transpose(2, 3).index_select(3, on_device(rows, states.device)).transpose(2, 3)
