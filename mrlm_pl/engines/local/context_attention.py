"""Attention of rows in generation to a shared context and the tokens fed since then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mrlm_pl.engines.local.generation import Rows


class ContextRows(Rows):
    """Rows that continue contexts, whose keys and values their decoder computes.

    Attributes:
        shared: zeros for the keys and values of the contexts, left-aligned, ``[layers, 2, U, KV heads, T, head size]``.
    """

    shared: Tensor


class Seen(NamedTuple):
    """Keys and values ``[N, KV heads, T, head size]``, and what is added to their scores, if anything."""

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
