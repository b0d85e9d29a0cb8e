"""The rows that a model generates through its own ``forward``: parts of rows that are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mrlm_pl.engines.backend import Context, Rows

if TYPE_CHECKING:
    from mrlm_pl.engines.generic import GenericModel


class Part:
    """Rows that share each forward pass.

    Args:
        model: the model.
        token_ids: all tokens of each row so far.
        cache: their states; None recomputes the rows for every token.
        mask: 1 at the columns that hold a token of the row, shape ``[B, T]``; None where no row is padded.

    Attributes:
        rows: the number of each row among those of the whole batch.
    """

    def __init__(self, model: GenericModel, token_ids: list[list[int]], cache: Any, mask: Tensor | None) -> None:
        self._model = model
        self.token_ids, self._cache, self._mask = token_ids, cache, mask
        self.rows: list[int] = []

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        for row, token in zip(self.token_ids, tokens.tolist(), strict=True):
            row.append(token)
        if self._cache is None:
            return self._model.forward(torch.tensor(self.token_ids, device=tokens.device), None, None)[0]
        if self._mask is not None:
            self._mask = torch.cat((self._mask, self._mask.new_ones(len(tokens), 1)), -1)
        logits, self._cache = self._model.forward(tokens[:, None], self._mask, self._cache)
        return logits

    def select(self, rows: Sequence[int]) -> None:
        """Rows become copies of ``rows`` (indices into the current ones)."""
        if list(rows) == list(range(len(self.token_ids))):
            return
        self.token_ids = [list(self.token_ids[b]) for b in rows]
        index = torch.tensor(rows, device=self._model.device)
        if self._mask is not None:
            self._mask = self._mask[index]
        if self._cache is not None:
            getattr(self._cache, self._model.use.select)(index)

    def states(self, row: int, length: int) -> Tensor | None:
        """A copy of the keys and values of a row's first ``length`` tokens; None unless all layers store them alike."""
        if not self._model.use.sessions or (self._model.boundary or length) < length:
            return None
        parts: list[Tensor] = []
        for layer in self._cache.layers:
            if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
                return None
            parts += [layer.keys[row], layer.values[row]]
        if len({part.shape for part in parts}) > 1:
            return None
        first = parts[0].shape[1] - len(self.token_ids[row])
        return torch.stack([part[:, first : first + length] for part in parts]).unflatten(0, (-1, 2))


class GenericRows(Rows):
    """Rows of a :class:`~mrlm_pl.engines.generic.GenericModel`.

    Args:
        model: the model.
        parts: the rows; each is in one of them.
    """

    def __init__(self, model: GenericModel, parts: list[Part]) -> None:
        self._model = model
        self._parts = parts

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        found: list[tuple[list[int], Tensor]] = []
        for part in list(self._parts):
            self._cross(part, tokens, found)
            if part.rows:
                found.append((part.rows, part.step(tokens if len(part.rows) == len(tokens) else tokens[part.rows])))
        self._parts = [part for part in self._parts if part.rows]
        if len(found) == 1:
            return found[0][1]
        order = torch.tensor([row for rows, _ in found for row in rows], device=tokens.device)
        return torch.cat([logits for _, logits in found])[order.argsort()]

    def _cross(self, part: Part, tokens: Tensor, found: list[tuple[list[int], Tensor]]) -> None:
        """Move the rows of a part that a token takes over the model's boundary to a part of their own, anew."""
        boundary = self._model.boundary
        if boundary is None or not any(len(row) == boundary for row in part.token_ids):
            return
        over = [i for i, row in enumerate(part.token_ids) if len(row) == boundary]
        rows = [part.rows[i] for i in over]
        contexts = [Context([*part.token_ids[i], int(tokens[part.rows[i]])], 1) for i in over]
        logits, new = self._model.start(contexts)
        new.rows = rows
        found.append((rows, logits))
        self._parts.append(new)
        stay = [i for i in range(len(part.rows)) if i not in over]
        part.rows = [part.rows[i] for i in stay]
        if stay:
            part.select(stay)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``."""
        new = {row: place for place, row in enumerate(rows)}
        for part in self._parts:
            stay = [i for i, row in enumerate(part.rows) if row in new]
            part.rows = [new[part.rows[i]] for i in stay]
            if stay:
                part.select(stay)
        self._parts = [part for part in self._parts if part.rows]

    def states(self, row: int, length: int) -> Tensor | None:
        """A copy of the keys and values of a row's first ``length`` tokens; None where they cannot be used again."""
        part = next(part for part in self._parts if row in part.rows)
        return part.states(part.rows.index(row), length)
