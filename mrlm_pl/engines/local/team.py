"""One decode step for the rows of several policies of one architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.local.adapters import Adapted, joined
from mrlm_pl.engines.local.decoder import Affine, Decoder, LayerWeights, Linear, storage_of
from mrlm_pl.engines.local.generation import Context, Rows, RowsInParts
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.engines.local.llama_rows import DecoderRows
from mrlm_pl.grouping import grouped


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts ``[N, out]``, in their memory's layout; see :meth:`Affine.apply`."""
    if parts[0].is_contiguous():
        return torch.cat([*parts])
    return torch.cat([part.t() for part in parts], 1).t()


@dataclass(frozen=True)
class TeamAffine:
    """A linear layer of each policy, for rows in the order of the policies.

    Args:
        layers: layer of each policy.
        counts: number of rows of each policy.
    """

    layers: Sequence[Linear]
    counts: list[int]

    def apply(self, h: Tensor) -> Tensor:
        """Return each row through its policy's layer, ``[N, out]``."""
        pairs = zip(self.layers, h.split(self.counts), strict=True)
        return stacked([layer.apply(rows) for layer, rows in pairs])

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """Return ``x + apply(h)``."""
        triples = zip(self.layers, x.split(self.counts), h.split(self.counts), strict=True)
        return stacked([layer.add_to(a, b) for layer, a, b in triples])


class TeamWeights:
    """The weights of several policies for rows in their order; see :class:`DecoderWeights`.

    Args:
        members: the policies with rows, of one :attr:`DecoderWeights.architecture`.
        counts: number of rows of each policy.
    """

    def __init__(self, members: Sequence[FusedDecoder], counts: list[int]) -> None:
        self._members, self._counts = [member.weights for member in members], counts
        self.sizes = self._members[0].sizes
        self.norm = self._by_row([w.norm for w in self._members])
        self.head = self._linear([w.head for w in self._members])
        self.layers = [self._join_layers(layers) for layers in zip(*(w.layers for w in self._members), strict=True)]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[N, hidden size]`` of tokens ``[N]``, one per row."""
        if len({w.embedding.data_ptr() for w in self._members}) == 1:
            return self._members[0].embed(ids)
        pairs = zip(self._members, ids.split(self._counts), strict=True)
        return torch.cat([w.embed(policy_ids) for w, policy_ids in pairs])

    def _join_layers(self, layers: Sequence[LayerWeights[Any]]) -> LayerWeights[Linear]:
        return LayerWeights(*map(self._join_part, zip(*(vars(layer).values() for layer in layers), strict=True)))

    def _join_part(self, parts: Sequence[Any]) -> Any:
        """Return a part of a layer, a norm or a linear layer, of all policies."""
        if isinstance(parts[0], Tensor):
            return self._by_row(parts)
        return None if parts[0] is None else self._linear(parts)

    def _linear(self, layers: Sequence[Affine | Adapted]) -> Linear:
        """Return a layer of each policy; a base that all share is multiplied once."""
        adapted = [layer for layer in layers if isinstance(layer, Adapted)]
        if len({storage_of(layer.weight) for layer in layers}) > 1 or 0 < len(adapted) < len(layers):
            return TeamAffine(layers, self._counts)
        return joined(adapted, self._counts) if adapted else layers[0]

    def _by_row(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the weight of each row's norm ``[N, ...]``; a weight that all share as it is."""
        if len({norm.data_ptr() for norm in norms}) == 1:
            return norms[0]
        return torch.cat([norm.expand(n, *norm.shape) for norm, n in zip(norms, self._counts, strict=True)])


class TeamDecoder(Decoder):
    """Several policies of one architecture: their contexts apart, each further token of all rows in one step.

    Projections use each policy's own weights, for its rows; all else is computed once for all rows. Compiled layers,
    which have weights of one policy, take the policies one after the other: the tokens alone are drawn together.

    Args:
        members: the decoder of each policy, of one :attr:`DecoderWeights.architecture`.
    """

    def __init__(self, members: Mapping[str, FusedDecoder]) -> None:
        self._members, self._first = members, next(iter(members.values()))
        super().__init__(self._first.device, self._first.weights.sizes.dtype)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines; see :class:`Decoder`."""
        return self._first.rotation(length)

    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Return logits ``[U, V]`` after each context, and rows that continue them; see :class:`Backend`."""
        by_policy = grouped((context.policy, context) for context in contexts)
        if self._first.rows is not DecoderRows:
            prefilled = [
                self._members[name].prefill(policy_contexts, reserve) for name, policy_contexts in by_policy.items()
            ]
            owners = (context.policy for context in contexts for _ in range(context.rows))
            numbers = grouped((owner, row) for row, owner in enumerate(owners)).values()
            parts = [(rows, row_numbers) for (_, rows), row_numbers in zip(prefilled, numbers, strict=True)]
            return torch.cat([logits for logits, _ in prefilled]), RowsInParts(parts)
        rows = TeamRows(self, contexts, reserve)
        logits, start = [], 0
        for name, policy_contexts in by_policy.items():
            logits.append(
                self._members[name].feed(policy_contexts, rows.shared[:, :, start : start + len(policy_contexts)])
            )
            start += len(policy_contexts)
        return torch.cat(logits), rows

    def arrange(self, owners: Sequence[str]) -> None:
        """Make the weights those of rows of these policies; the rows of a policy are side by side."""
        counts = grouped((owner, 1) for owner in owners)
        self.weights = TeamWeights([self._members[name] for name in counts], [len(rows) for rows in counts.values()])


class TeamRows(DecoderRows):
    """Rows of a :class:`TeamDecoder`.

    Args:
        decoder: the policies.
        contexts: contexts of the rows.
        reserve: maximum number of tokens to append.
    """

    def __init__(self, decoder: TeamDecoder, contexts: Sequence[Context], reserve: int) -> None:
        self._team = decoder
        self._owners = [context.policy for context in contexts for _ in range(context.rows)]
        decoder.arrange(self._owners)
        lengths, counts = [len(context.token_ids) for context in contexts], [context.rows for context in contexts]
        super().__init__(decoder, lengths, counts, reserve)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``, and contexts without rows."""
        super().keep(rows)
        self._owners = [self._owners[row] for row in rows]
        self._owners += [self._owners[-1]] * (len(self._contexts) - len(rows))  # the last row is repeated
        self._team.arrange(self._owners)
