"""Attention over one packed row of shared prefixes and the rows that continue them, for Hugging Face decoders.

The decoder sees a single sequence [1, N]: first the prefix of every group, then the own tokens of every row. The
function registered with transformers cuts that sequence into segments: prefixes attend causally to themselves, a row's
own tokens attend to the whole prefix of their group and causally to themselves. Everything else in the decoder works
token by token and needs no change, so adapters, sharding hooks and gradient checkpointing keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mrlm_pl.policy.packing import Segments

ATTENTION_NAME = "mrlm_packed"


class _Block:
    """Consecutive segments of the packed row, seen as a batch [S, W] of S segments padded to the longest, W tokens."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        self.width = max(lengths, default=0)
        self.tokens = sum(lengths)
        self.uniform = self.tokens == len(lengths) * self.width
        if not self.uniform:
            sizes = torch.tensor(lengths)
            column = torch.arange(self.width)
            real = column < sizes[:, None]
            first = sizes.cumsum(0) - sizes
            # padding repeats the block's first token: finite, never attended to by a real token
            self._source = torch.where(real, first[:, None] + column, 0).reshape(-1).to(device)
            self._real = real.reshape(-1).nonzero().squeeze(1).to(device)

    def batched(self, states: Tensor) -> Tensor:
        """This block's states [tokens, heads, dim] as [S, W, heads, dim]; a view when all lengths are equal."""
        if not self.uniform:
            states = states.index_select(0, self._source)
        return states.unflatten(0, (len(self.lengths), self.width))

    def flattened(self, states: Tensor) -> Tensor:
        """The inverse of `batched`."""
        states = states.flatten(0, 1)
        return states if self.uniform else states.index_select(0, self._real)


class PackedLayout:
    """The segments of a packed row, prepared once for all layers of a forward pass."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self._prefixes = _Block(0, segments.prefix_lengths, device)
        self._own = _Block(self._prefixes.tokens, segments.own_lengths, device)
        rows, groups = len(segments.own_lengths), len(segments.prefix_lengths)
        self._rows_per_prefix = rows // groups
        if segments.row_prefix == tuple(row // self._rows_per_prefix for row in range(rows)):
            self._row_prefix = None
        else:
            self._row_prefix = torch.tensor(segments.row_prefix, device=device)
        self._mask = self._own_mask(segments).to(device) if self._prefixes.tokens else None

    def _own_mask(self, segments: Segments) -> Tensor:
        """[1 or R, 1, own width, prefix width + own width] bool: which keys the own tokens attend to."""
        prefix_width, width = self._prefixes.width, self._own.width
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        if self._prefixes.uniform:
            in_prefix = torch.ones(1, prefix_width, dtype=torch.bool)
        else:
            lengths = torch.tensor([segments.prefix_lengths[prefix] for prefix in segments.row_prefix])
            in_prefix = torch.arange(prefix_width) < lengths[:, None]
        rows = in_prefix.shape[0]
        return torch.cat(
            [in_prefix[:, None, None].expand(rows, 1, width, prefix_width), causal.expand(rows, 1, width, width)], -1
        )

    def _for_rows(self, prefix_states: Tensor) -> Tensor:
        """States per prefix [G, W, heads, dim] repeated for each of its rows, [R, W, heads, dim]."""
        if self._row_prefix is not None:
            return prefix_states.index_select(0, self._row_prefix)
        return prefix_states.repeat_interleave(self._rows_per_prefix, 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attention output [N, heads, dim] for queries [N, heads, dim] and keys and values [N, kv heads, dim]."""
        sizes = [self._prefixes.tokens, self._own.tokens]
        if not sizes[0]:
            own_q, own_k, own_v = (self._own.batched(x) for x in (query, key, value))
            return self._own.flattened(_attention(own_q, own_k, own_v, scaling))
        (prefix_q, own_q), (prefix_k, own_k), (prefix_v, own_v) = (x.split(sizes) for x in (query, key, value))
        prefix_q, prefix_k, prefix_v = (self._prefixes.batched(x) for x in (prefix_q, prefix_k, prefix_v))
        prefix_out = self._prefixes.flattened(_attention(prefix_q, prefix_k, prefix_v, scaling))
        if not sizes[1]:
            return prefix_out
        keys = torch.cat([self._for_rows(prefix_k), self._own.batched(own_k)], 1)
        values = torch.cat([self._for_rows(prefix_v), self._own.batched(own_v)], 1)
        own_out = _attention(self._own.batched(own_q), keys, values, scaling, self._mask)
        return torch.cat([prefix_out, self._own.flattened(own_out)])


def _attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None = None) -> Tensor:
    """Attention of [S, L, heads, dim], causal unless a mask is given; keys may have fewer heads than queries."""
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function in the form that transformers calls; always without dropout.

    Query is [1, heads, N, dim], the result [1, N, heads, dim].

    Raises:
        RuntimeError: the module was called without a layout while the packed attention was switched on.
    """
    if packed_layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without packed_layout while its attention is {ATTENTION_NAME!r}: "
            "another thread uses the module during token_logprobs; give that thread its own copy of the model"
        )
    # under autocast the rotary embedding has promoted queries and keys: cast them back before keys are copied
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return packed_layout.attend(query, key, value, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)


class ForwardSwitches:
    """What is set differently on a module while its log-probabilities are computed, and set back afterwards.

    Every dropout rate is 0, so that the log-probabilities are those of the distribution that was sampled from; and,
    given a name, that attention implementation is used. Layers under gradient checkpointing run again during the
    backward pass, long after the forward pass has ended: they are recomputed within the same switches.
    """

    def __init__(self, model: nn.Module, attention: str | None) -> None:
        self._values: list[tuple[Any, str, Any]] = []
        if attention is not None:
            self._values.append((model.config, "_attn_implementation", attention))
        self._checkpointing: list[tuple[Any, str, Any]] = []
        if not model.training:
            return
        module: Any
        for module in model.modules():
            if isinstance(module, nn.Dropout) and module.p:
                self._values.append((module, "p", 0.0))
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float) and value:
                    self._values.append((module, name, 0.0))
            if getattr(module, "gradient_checkpointing", False):
                recompute = self._recompute_within(module._gradient_checkpointing_func)
                self._checkpointing.append((module, "_gradient_checkpointing_func", recompute))

    def __enter__(self) -> None:
        self._before = _exchange(self._values + self._checkpointing)

    def __exit__(self, *_: object) -> None:
        _exchange(self._before)

    def _recompute_within(self, checkpointing: Callable[..., Any]) -> Callable[..., Any]:
        """``checkpointing``, applied to a layer's forward function that sets the switches whenever it runs."""

        def apply(forward: Callable[..., Any], *args: Any) -> Any:
            def run(*inputs: Any) -> Any:
                before = _exchange(self._values)
                try:
                    return forward(*inputs)
                finally:
                    _exchange(before)

            return checkpointing(run, *args)

        return apply


def _exchange(values: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """The previous values of these (owner, attribute, value) triples, which are set."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    return before
