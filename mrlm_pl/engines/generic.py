"""Any causal language model of transformers, through its own ``forward`` and its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mrlm_pl.engines.backend import Backend, Context, Rows
from mrlm_pl.engines.plain_module import own_copy
from mrlm_pl.policy.sharding import whole


class GenericModel(Backend):
    """A ``transformers`` causal LM, run with left padding, an attention mask and explicit positions.

    The dropout of a module in training mode is off while it generates. A model whose ``forward`` takes no
    ``past_key_values`` (a state-space model, for example) is given the whole row again for every token, one row length
    at a time: correct, but slow.

    Args:
        model: the module.
        dtype: compute dtype; other than the module's own it is reached by autocast.
        own: run a copy of the module, which takes over its weights in :meth:`refresh` alone.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, own: bool = False) -> None:
        self._source = model
        self._model = own_copy(model) if own else model
        self._dtype = dtype
        parameters = inspect.signature(model.forward).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in parameters}
        self.has_cache = "past_key_values" in parameters
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the module's weights and buffers if they are not used where they are."""
        if self._model is not self._source:
            held = _tensors(self._model)
            for name, value in _tensors(self._source).items():
                held[name].copy_(whole(value))
        self.device = next(self._model.parameters()).device

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        training = [module for module in self._model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with (
                torch.no_grad(),
                torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype != self._model.dtype),
            ):
                yield
        finally:
            for module in training:
                module.training = True

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kind that the model's layers need."""
        return DynamicCache(config=self._model.config)

    def forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache | None) -> Tensor:
        """Logits ``[B, V]`` after the last column of ``ids`` ``[B, T]``; ``mask`` ``[B, past + T]`` is 1 at tokens."""
        arguments: dict[str, object] = {}
        if "position_ids" in self._takes:
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = 1
        if cache is not None:
            arguments["past_key_values"] = cache
        if self.has_cache:
            arguments["use_cache"] = cache is not None
        with self._evaluation():
            logits: Tensor = self._model(input_ids=ids, attention_mask=mask, **arguments).logits
        return logits[:, -1]

    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Logits ``[U, V]`` after each context, and rows that continue them; see :class:`Backend`."""
        repeats = torch.tensor([context.rows for context in contexts], device=self.device)
        if not self.has_cache:
            rows = RecomputedRows(self, [list(context.token_ids) for context in contexts])
            logits = rows.logits()
            rows.keep([u for u, context in enumerate(contexts) for _ in range(context.rows)])
            return logits, rows
        cache, cached_mask = self._cached(contexts)
        new = [list(context.token_ids[context.cached :]) for context in contexts]
        width = max(map(len, new))
        ids = torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in new], device=self.device)
        lengths = torch.tensor([len(tokens) for tokens in new], device=self.device)
        new_mask = torch.arange(width, device=self.device) >= (width - lengths)[:, None]
        mask = torch.cat((cached_mask, new_mask.long()), -1)
        logits = self.forward(ids, mask, cache)
        index = torch.arange(len(contexts), device=self.device).repeat_interleave(repeats)
        cache.batch_select_indices(index)
        return logits, GenericRows(self, cache, mask[index])

    def _cached(self, contexts: Sequence[Context]) -> tuple[DynamicCache, Tensor]:
        """A cache that holds the contexts' given states, right-aligned, and its mask ``[U, cached]``."""
        cache = self.new_cache()
        width = max(context.cached for context in contexts)
        mask = torch.zeros(len(contexts), width, dtype=torch.long, device=self.device)
        if width == 0:
            return cache, mask
        example = next(context.states for context in contexts if context.states is not None)
        layers, _, heads, _, size = example.shape
        states = example.new_zeros(layers, 2, len(contexts), heads, width, size)
        for u, context in enumerate(contexts):
            if context.states is not None:
                states[:, :, u, :, width - context.cached :] = context.states
                mask[u, width - context.cached :] = 1
        for i, (keys, values) in enumerate(states):
            cache.update(keys, values, i)
        return cache, mask


class GenericRows(Rows):
    """Rows of a :class:`GenericModel` with its cache.

    Args:
        model: the model.
        cache: keys and values of the rows so far.
        mask: 1 at the columns that hold a token of the row, shape ``[B, T]``.
    """

    def __init__(self, model: GenericModel, cache: DynamicCache, mask: Tensor) -> None:
        self._model = model
        self._cache = cache
        self._mask = mask

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        self._mask = torch.cat((self._mask, self._mask.new_ones(len(tokens), 1)), -1)
        return self._model.forward(tokens[:, None], self._mask, self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``."""
        index = torch.tensor(rows, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]

    def states(self, row: int, length: int) -> Tensor | None:
        """A copy of the keys and values of a row's first ``length`` tokens; None unless all layers store them alike."""
        parts: list[Tensor] = []
        for layer in self._cache.layers:
            if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
                return None
            parts += [layer.keys[row], layer.values[row]]
        if len({part.shape for part in parts}) > 1:
            return None
        columns = self._mask[row].nonzero()[:length, 0]
        return torch.stack([part[:, columns] for part in parts]).unflatten(0, (-1, 2))


class RecomputedRows(Rows):
    """Rows of a model without a key/value cache.

    Args:
        model: the model.
        token_ids: the tokens of each row.
    """

    def __init__(self, model: GenericModel, token_ids: list[list[int]]) -> None:
        self._model = model
        self._token_ids = token_ids

    def logits(self) -> Tensor:
        """Logits ``[B, V]`` after each row; rows of one length are computed together, without padding."""
        by_length: dict[int, list[int]] = {}
        for b, tokens in enumerate(self._token_ids):
            by_length.setdefault(len(tokens), []).append(b)
        out: list[Tensor] = [torch.empty(0)] * len(self._token_ids)
        for rows in by_length.values():
            ids = torch.tensor([self._token_ids[b] for b in rows], device=self._model.device)
            logits = self._model.forward(ids, torch.ones_like(ids), None)
            for i, b in enumerate(rows):
                out[b] = logits[i]
        return torch.stack(out)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        for row, token in zip(self._token_ids, tokens.tolist(), strict=True):
            row.append(token)
        return self.logits()

    def keep(self, rows: Sequence[int]) -> None:
        """Rows become copies of ``rows`` (indices into the current ones)."""
        self._token_ids = [list(self._token_ids[b]) for b in rows]

    def states(self, row: int, length: int) -> None:
        """None: there are no keys and values."""
        return


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    # Not `state_dict`, before which a sharded model lets go of what it has gathered.
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
