"""Any causal language model of transformers, through its own ``forward`` and its own cache."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mrlm_pl.engines.local.generation import Backend, Context, Rows, RowsInParts, States
from mrlm_pl.errors import EngineError
from mrlm_pl.grouping import grouped
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.compilation import plain_layers
from mrlm_pl.policy.forward.attention import exchanged
from mrlm_pl.policy.forward.families import rope_boundary
from mrlm_pl.policy.pretrained import context_window
from mrlm_pl.policy.sharding import all_tensors, whole

# Argument of ``forward``, and attribute of its output, with the states of the past tokens.
_CACHES = ("past_key_values", "cache", "cache_params", "state")  # transformers 5.24 renamed the first of them


class CacheUse(NamedTuple):
    """The use of a model's cache.

    Attributes:
        select: the cache's method that selects rows; "" recomputes every row for every token.
        padded: rows of different lengths share a forward pass, padded on the left; else rows of equal length do.
        sessions: keep keys and values of a finished turn for the next turn.
    """

    select: str = ""
    padded: bool = False
    sessions: bool = False

    @property
    def cached(self) -> bool:
        """True if there is a cache."""
        return bool(self.select)


class GenericModel(Backend):
    """A ``transformers`` causal LM, run through its own ``forward``, in evaluation mode.

    The use of its cache depends on the model: recurrent states cannot be truncated, some caches select rows wrongly or
    not at all, and some models compute padded rows differently. :func:`~.cache_check.cache_use` detects it; without a
    use the rows are recomputed for every token.

    Rotary embeddings that change beyond a length (``longrope``) follow each row's own length: rows on the two sides of
    that length are computed apart, and a row that crosses it is recomputed, as in ``generate``.

    Args:
        model: the module.
        dtype: compute dtype; one other than the module's own uses autocast.
        own: run a copy of the module, which reads its weights in :meth:`refresh` alone.

    Attributes:
        cache_name: the argument of ``forward`` that takes the cache; None where there is none.
        use: how the cache is used; no use before :func:`~.cache_check.cache_use`.
        boundary: length beyond which the rotary embedding changes; infinite if it never does.
        window: context length, which some models' tables of positions have; None if there is no bound.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, own: bool = False) -> None:
        self._source = model
        self.model = Architecture.of(model).build(model.device) if own else model
        self.dtype = dtype
        self._takes = set(inspect.signature(model.forward).parameters)
        self.cache_name = next((name for name in _CACHES if name in self._takes), None)
        self.use = CacheUse()
        self.boundary = rope_boundary(model.config) or math.inf
        self.window = context_window(model.config)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the module's weights and buffers into an own copy."""
        if self.model is not self._source:
            copied = all_tensors(self.model)
            for name, value in all_tensors(self._source).items():
                copied[name].copy_(whole(value))
        self.device = next(self.model.parameters()).device

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        with (
            exchanged([(module, "training", False) for module in self.model.modules() if module.training]),
            torch.no_grad(),
            plain_layers(self.model),
            torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != self.model.dtype),
        ):
            yield

    def forward(self, ids: Tensor, mask: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        """Return logits ``[B, V]`` after the last column of ``ids`` ``[B, T]``, and the cache with these tokens.

        Args:
            ids: token ids.
            mask: ``[B, past + T]``, 1 at tokens; None if no row is padded.
            cache: the states of the past; None without a past.
        """
        arguments: dict[str, Any] = {"logits_to_keep": 1, "use_cache": self.use.cached}
        if mask is not None:
            arguments["attention_mask"] = mask
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        arguments = {name: value for name, value in arguments.items() if name in self._takes}
        if cache is not None:
            assert self.cache_name is not None
            arguments[self.cache_name] = cache
        with self._evaluation():
            output = self.model(input_ids=ids, **arguments)
        logits: Tensor = output.logits
        if not self.use.cached:
            return logits[:, -1], None
        cache = getattr(output, self.cache_name or "", None)
        if cache is None:
            raise EngineError(f"the forward of {type(self.model).__name__} returns no {self.cache_name}")
        return logits[:, -1], cache

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` after all tokens of rows ``ids`` ``[B, T]``, without a cache."""
        with self._evaluation():
            output = self.model(input_ids=ids, **({"use_cache": False} if "use_cache" in self._takes else {}))
        return output.logits

    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Return logits ``[U, V]`` after each context, and rows that continue them; see :class:`Backend`."""
        last: list[Tensor] = [torch.empty(0)] * len(contexts)
        parts = []
        first = list(accumulate((context.rows for context in contexts), initial=0))
        lengths = (len(context.token_ids) for context in contexts)
        kinds = (length > self.boundary if self.use.padded else length for length in lengths)
        for together in grouped((kind, u) for u, kind in enumerate(kinds)).values():
            logits, part = self.start([contexts[u] for u in together])
            for u, row in zip(together, logits, strict=True):
                last[u] = row
            part.keep([i for i, u in enumerate(together) for _ in range(contexts[u].rows)])
            parts.append((part, [row for u in together for row in range(first[u], first[u + 1])]))
        return torch.stack(last), GenericRows(self, parts)

    def start(self, contexts: Sequence[Context]) -> tuple[Tensor, Part]:
        """Return logits ``[U, V]`` after contexts that are computed together, and a part with one row for each.

        All contexts compute equally many new tokens, and use fewer of their known states if necessary: a hole in the
        middle of a row would change distances in models that measure them by column.
        """
        token_ids = [list(context.token_ids) for context in contexts]
        if not self.use.padded:
            logits, cache = self.forward(torch.tensor(token_ids, device=self.device), None, None)
            return logits, Part(self, token_ids, cache, None)
        kept = [c.cached if self.use.sessions and len(c.token_ids) <= self.boundary else 0 for c in contexts]
        width = max(len(tokens) - count for tokens, count in zip(token_ids, kept, strict=True))
        cached = [max(0, len(tokens) - width) for tokens in token_ids]
        new = [tokens[count:] for tokens, count in zip(token_ids, cached, strict=True)]
        ids = torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in new], device=self.device)
        columns = max(cached) + width
        lengths = torch.tensor([len(tokens) for tokens in token_ids], device=self.device)
        mask = (torch.arange(columns, device=self.device) >= columns - lengths[:, None]).long()
        cache = self._restore_cache(contexts, cached) if max(cached) else None
        logits, cache = self.forward(ids, mask, cache)
        return logits, Part(self, token_ids, cache, mask)

    def _restore_cache(self, contexts: Sequence[Context], cached: Sequence[int]) -> DynamicCache:
        """Return a cache that holds the states of each context's first ``cached`` tokens, right-aligned."""
        example = next(context.states for context in contexts if context.states is not None).parts[0]
        layers, _, heads, _, size = example.shape
        width = max(cached)
        states = example.new_zeros(layers, 2, len(contexts), heads, width, size)
        for u, (context, count) in enumerate(zip(contexts, cached, strict=True)):
            if context.states is not None and count:
                context.states.first(count).copy_to(states[:, :, u, :, width - count :])
        cache = DynamicCache(config=self.model.config)
        for i, (keys, values) in enumerate(states):
            cache.update(keys, values, i)
        return cache


class Part(Rows):
    """Rows of one forward pass.

    Args:
        model: the model.
        token_ids: tokens of each row up to now.
        cache: their states; None recomputes the rows for every token.
        mask: 1 at the tokens of the row, shape ``[B, T]``; None if no row is padded.
    """

    def __init__(self, model: GenericModel, token_ids: list[list[int]], cache: Any, mask: Tensor | None) -> None:
        self._model = model
        self.token_ids, self.mask, self._cache = token_ids, mask, cache

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        for row, token in zip(self.token_ids, tokens.tolist(), strict=True):
            row.append(token)
        if self._cache is None:
            return self._model.forward(torch.tensor(self.token_ids, device=tokens.device), None, None)[0]
        if self.mask is not None:
            self.mask = torch.cat((self.mask, self.mask.new_ones(len(tokens), 1)), -1)
        logits, self._cache = self._model.forward(tokens[:, None], self.mask, self._cache)
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of ``rows``; an index may come several times."""
        if list(rows) == list(range(len(self.token_ids))):
            return
        self.token_ids = [list(self.token_ids[b]) for b in rows]
        index = torch.tensor(rows, device=self._model.device)
        if self.mask is not None:
            self.mask = self.mask[index]
        if self._cache is not None:
            getattr(self._cache, self._model.use.select)(index)

    def states(self, row: int, length: int) -> States | None:
        """Return a copy of keys and values of a row's first ``length`` tokens; None unless all layers store them."""
        if not self._model.use.sessions or length > self._model.boundary:
            return None
        layers = self._cache.layers
        if any(type(layer) is not DynamicLayer or layer.keys is None or layer.values is None for layer in layers):
            return None
        states = [states[row] for layer in layers for states in (layer.keys, layer.values)]
        if len({layer_states.shape for layer_states in states}) > 1:
            return None
        first = states[0].shape[1] - len(self.token_ids[row])
        return States(
            (torch.stack([layer_states[:, first : first + length] for layer_states in states]).unflatten(0, (-1, 2)),)
        )


class GenericRows(RowsInParts):
    """Rows of a :class:`~mrlm_pl.engines.local.transformers_model.GenericModel`.

    Args:
        model: the model.
        parts: the rows of each forward pass, with their numbers in the batch.
    """

    def __init__(self, model: GenericModel, parts: Sequence[tuple[Part, list[int]]]) -> None:
        super().__init__(parts)
        self._model = model

    def _step_part(self, part: Part, numbers: list[int], tokens: Tensor) -> list[tuple[Rows, list[int], Tensor]]:
        """Recompute rows that cross the model's boundary with their next token, as a separate part.

        The remaining rows are recomputed too once the padding and the tokens of a part fill the model's window.
        """
        full = part.mask is not None and part.mask.shape[1] == self._model.window
        over = [i for i, row in enumerate(part.token_ids) if full or len(row) == self._model.boundary]
        if not over:
            return super()._step_part(part, numbers, tokens)
        logits, new = self._model.start([Context([*part.token_ids[i], int(tokens[i])], 1) for i in over])
        crossed = (new, [numbers[i] for i in over], logits)
        stay = [i for i in range(len(numbers)) if i not in over]
        if not stay:
            return [crossed]
        part.keep(stay)
        return [crossed, *super()._step_part(part, [numbers[i] for i in stay], tokens[stay])]
