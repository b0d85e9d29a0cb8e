"""Attention over one packed row of shared segments and the rows that continue them, for Hugging Face decoders.

The decoder sees a single sequence [1, N]: first the shared segments, level by level, then each row's own tokens. The
function registered with transformers splits that sequence into its segments: each attends to the whole chain of
segments before it and causally to itself. All other parts of the decoder work token by token, so adapters, sharding
hooks and gradient checkpointing keep working.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from mrlm_pl.policy.forward.devices import attention_dtype, on_device
from mrlm_pl.policy.forward.packing import Segments
from mrlm_pl.policy.forward.tree_attention import tree_attention, tree_mask

ATTENTION_NAME = "mrlm_packed"
_HALF = (torch.bfloat16, torch.float16)
MASK_ELEMENTS = 2**24
"""Most elements of an attention mask; 64 MB in float32. A row of 32,000 tokens has a billion."""
CAUSAL_TOKENS = 1024
"""Fewest keys for which a causal kernel over whole rows, with the results of earlier tokens dropped, replaces a mask.
It skips hidden keys in blocks of about 500."""


class _Block:
    """Consecutive segments of the packed row as a batch [S, W]: S segments padded to the longest, W tokens."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        self.width = max(lengths, default=0)
        self.tokens = sum(lengths)
        self.uniform = self.tokens == len(lengths) * self.width
        if not self.uniform:
            sizes = torch.tensor(lengths)
            column = torch.arange(self.width)
            real = column < sizes[:, None]
            first = sizes.cumsum(0) - sizes
            # padding repeats the block's first token: finite, and real tokens never attend to it
            self._source = on_device(torch.where(real, first[:, None] + column, 0).reshape(-1), device)
            self._real = on_device(real.reshape(-1).nonzero().squeeze(1), device)

    def batched(self, states: Tensor) -> Tensor:
        """Return this block's states [tokens, heads, dim] as [S, W, heads, dim]; a view if all lengths are equal."""
        if not self.uniform:
            states = states.index_select(0, self._source)
        return states.unflatten(0, (len(self.lengths), self.width))

    def flattened(self, states: Tensor) -> Tensor:
        """Return the inverse of `batched`."""
        states = states.flatten(0, 1)
        return states if self.uniform else states.index_select(0, self._real)


class _Level:
    """The segments of one level of a packed row, and their chains of segments of earlier levels."""

    def __init__(self, segments: Segments, level: int, blocks: Sequence[_Block], device: torch.device) -> None:
        self.block = blocks[level]
        chains, width = segments.ancestors[level], blocks[level].width
        # the segments of an earlier level in these chains: the level, and each chain's segment or its repetitions
        self.before: list[tuple[int, Tensor | int]] = []
        masks = []
        for earlier in range(level):
            parents = [chain[earlier] for chain in chains]
            lengths = segments.lengths[earlier]
            repeats = len(parents) // len(lengths)
            in_order = parents == [number // repeats for number in range(len(parents))] if repeats else False
            index = repeats if in_order else on_device(torch.tensor(parents).clamp(min=0), device)
            self.before.append((earlier, index))
            length = torch.tensor([lengths[parent] if parent >= 0 else 0 for parent in parents])
            masks.append(torch.arange(blocks[earlier].width) < length[:, None])
        self._chain: Tensor | None = None
        self._mask: Tensor | None = None
        self._causal: _CausalLayout | None = None
        if masks:
            chain = torch.cat(masks, 1)
            equal, before = bool(chain.all()), chain.shape[1]
            if CAUSAL_TOKENS - width <= before <= width:
                self._causal = _CausalLayout(None if equal else chain, before, width, device)
            self._chain = on_device(chain[:1] if equal else chain, device)
            self._parts = self._divide(*self._chain.shape)

    def _divide(self, rows: int, before: int) -> list[list[tuple[slice, slice]]]:
        """Return segments and queries whose masks are held at once: lists, by segments, of parts of their queries.

        Args:
            rows: number of masks, one for each segment or one for all of them.
            before: number of keys of a chain.
        """
        segments, width = len(self.block.lengths), self.block.width
        queries = max(1, min(width, MASK_ELEMENTS // (before + width)))
        together = segments if rows == 1 else max(1, MASK_ELEMENTS // (queries * (before + width)))
        return [
            [(slice(row, row + together), slice(i, min(i + queries, width))) for i in range(0, width, queries)]
            for row in range(0, segments, together)
        ]

    def attend(
        self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float | None, dropout: float
    ) -> Tensor:
        """Return the attention [S, W, heads, dim] of these segments to their chains and causally to themselves.

        A mask of all segments and queries grows with the square of their length, and the backward pass would keep it.
        Long segments need none if their chains are not longer; for others the mask is made part by part, and again in
        the backward pass.

        Args:
            query: [S, W, heads, dim], queries of these segments.
            keys, values: [S, W, heads, dim] by level; the last are those of these segments.
        """
        key, value = self.with_chains(keys), self.with_chains(values)
        if self._chain is None:
            return _attention(query, key, value, scaling, None, dropout)
        if self._causal is not None:
            return self._causal.attend(query, key, value, scaling, dropout)
        if len(self._parts) == len(self._parts[0]) == 1:
            if self._mask is None or self._mask.dtype != query.dtype:  # one for all layers
                self._mask = self._part_mask(*self._parts[0][0], query.dtype)
            return _attention(query, key, value, scaling, self._mask, dropout)
        run = self._attend_part
        if torch.is_grad_enabled():
            run = functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=dropout > 0)
        return torch.cat(
            [torch.cat([run(query, key, value, part, scaling, dropout) for part in parts], 1) for parts in self._parts]
        )

    def _attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: tuple[slice, slice],
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        rows, queries = part
        last = key.shape[1] - self.block.width + queries.stop
        mask = self._part_mask(rows, queries, query.dtype)
        return _attention(query[rows, queries], key[rows, :last], value[rows, :last], scaling, mask, dropout)

    def _part_mask(self, rows: slice, queries: slice, dtype: torch.dtype) -> Tensor:
        """Return 0 or -inf by key up to the last query, [1 or S, 1, W, keys]: the chain, and causally the segment."""
        assert self._chain is not None
        chain = self._chain if len(self._chain) == 1 else self._chain[rows]
        width = queries.stop - queries.start
        causal = torch.ones(width, queries.stop, dtype=torch.bool, device=chain.device).tril(queries.start)
        shape = (len(chain), 1, width, -1)
        visible = torch.cat([chain[:, None, None].expand(shape), causal.expand(shape)], -1)
        return torch.zeros(visible.shape, dtype=dtype, device=chain.device).masked_fill_(~visible, float("-inf"))

    def with_chains(self, states: Sequence[Tensor]) -> Tensor:
        """Return states of these segments after those of their chains, [S, keys, heads, dim].

        Args:
            states: [S, W, heads, dim] by level.
        """
        own_states = states[-1]
        if not self.before:
            return own_states
        return torch.cat([*(_repeat(states[level], parents) for level, parents in self.before), own_states], 1)


class _CausalLayout:
    """Queries at the places of their tokens in whole rows, so that a causal kernel needs no mask.

    Args:
        chain: [S, keys before] bool, True for the keys of each segment's chain; None is all of them.
        before: number of keys before the segments.
        width: number of queries of a segment.
        device: device of the states.
    """

    def __init__(self, chain: Tensor | None, before: int, width: int, device: torch.device) -> None:
        self._before = before
        self._order: Tensor | None = None
        if chain is not None:
            keys = before + width
            first = torch.arange(0, len(chain) * keys, keys)[:, None]
            hidden = F.pad(~chain, (0, width)).int()
            self._order = on_device((hidden.argsort(dim=1, stable=True) + first).flatten(), device)
            self._places = on_device((chain.sum(1, keepdim=True) + torch.arange(width) + first).flatten(), device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """Return the attention [S, W, heads, dim] of queries to keys and values [S, keys, heads, dim]."""
        if self._order is None:
            query = F.pad(query, (0, 0, 0, 0, self._before, 0))
            return _attention(query, key, value, scaling, None, dropout)[:, self._before :]
        rows = key.shape[:2]
        key, value = (x.flatten(0, 1).index_select(0, self._order).unflatten(0, rows) for x in (key, value))
        placed = query.new_zeros(key.shape[0] * key.shape[1], *query.shape[2:])
        placed = placed.index_copy(0, self._places, query.flatten(0, 1)).unflatten(0, rows)
        attended = _attention(placed, key, value, scaling, None, dropout)
        return attended.flatten(0, 1).index_select(0, self._places).unflatten(0, query.shape[:2])


def _repeat(states: Tensor, parents: Tensor | int) -> Tensor:
    """Return states [S, W, heads, dim] of the given segments, or of each, repeated this number of times."""
    if isinstance(parents, Tensor):
        return states.index_select(0, parents)
    return states.repeat_interleave(parents, 0)


class PackedLayout:
    """The segments of a packed row, prepared for all layers of a forward pass.

    Args:
        segments: segments of the packed row.
        device: device of the model.
        in_one: whether one kernel computes the attention, without dropout, and reads shared keys and values in place;
            see `has_kernel`. Otherwise it is computed segment by segment.
    """

    def __init__(self, segments: Segments, device: torch.device, in_one: bool = False) -> None:
        self._mask = tree_mask(segments, device) if in_one else None
        blocks = [] if in_one else [_Block(lengths, device) for lengths in segments.lengths]
        self._levels = [_Level(segments, level, blocks, device) for level in range(len(blocks))]
        self._sizes = [sum(lengths) for lengths in segments.lengths]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float = 0.0) -> Tensor:
        """Return the attention [N, heads, dim] of queries [N, heads, dim] to keys and values [N, kv heads, dim].

        That of padding behind the segments is 0.
        """
        real, tokens = sum(self._sizes), len(query)
        query, key, value = query[:real], key[:real], value[:real]
        if self._mask is not None:
            attended = tree_attention(query, key, value, self._mask, scaling)
        else:
            attended = self._by_segment(query, key, value, scaling, dropout)
        return F.pad(attended, (0, 0, 0, 0, 0, tokens - real)) if real < tokens else attended

    def _by_segment(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        by_level = (states.split(self._sizes) for states in (query, key, value))
        for level, own_q, own_k, own_v in zip(self._levels, *by_level, strict=True):
            keys.append(level.block.batched(own_k))
            values.append(level.block.batched(own_v))
            output = level.attend(level.block.batched(own_q), keys, values, scaling, dropout)
            outputs.append(level.block.flattened(output))
        return torch.cat(outputs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None, dropout: float
) -> Tensor:
    """Return attention of [S, L, heads, dim]; see :func:`grouped_attention`."""
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    return grouped_attention(query, key, value, scaling, mask, dropout).transpose(1, 2)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return attention of [S, heads, L, dim], causal without a mask; keys may have fewer heads than queries."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type == "cuda" and (mask is not None or query.dtype not in _HALF):
        # the kernels that hold no table of tokens by tokens then take equal numbers of heads alone
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention for transformers, from a query [1, heads, N, dim] to a result [1, N, heads, dim].

    Raises:
        RuntimeError: the module was called without a layout while packed attention was on.
    """
    if packed_layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without packed_layout while its attention is {ATTENTION_NAME!r}: "
            "another thread uses the module during token_logprobs; give that thread its own copy of the model"
        )
    # under autocast the rotary embedding promotes queries and keys: one dtype before keys are copied
    computed = attention_dtype(value.dtype, value.device)
    query, key, states = (x[0].transpose(0, 1).to(computed) for x in (query, key, value))
    with torch.autocast(value.device.type, enabled=False):  # which would cast to its own dtype
        attended = packed_layout.attend(query, key, states, scaling, dropout)
    return attended.to(value.dtype).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)


@contextmanager
def forward_switches(model: nn.Module, attention: str | None, noise: bool = False) -> Iterator[None]:
    """Switch the settings of a module while its log-probabilities are computed within the context.

    All modules are in evaluation mode, without dropout or noise in a router, so that the log-probabilities are those of
    the sampled distribution. With ``noise`` they keep their mode. A name selects that attention implementation.

    Layers under gradient checkpointing must be called in training mode, and run again during the backward pass, long
    after the forward pass: they are computed, and recomputed, within the same switches.
    """
    implementation: _Values = [] if attention is None else [(model.config, "_attn_implementation", attention)]
    values = list(implementation)
    for module in model.modules():
        if module.training and vars(module).get("gradient_checkpointing"):
            values.append((module, "_gradient_checkpointing_func", _with_switches(module, implementation, noise)))
            if not noise:  # training-only noise of the layer itself, such as layer drop
                rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
                values += [(module, name, 0.0) for name in rates]
        elif module.training and not noise:
            values.append((module, "training", False))
    with exchanged(values):
        yield


def _with_switches(module: Any, implementation: _Values, noise: bool) -> Callable[..., Any]:
    """Return the module's checkpointing function, with the switches set while the forward function runs."""
    checkpointing = module._gradient_checkpointing_func

    def apply(forward: Callable[..., Any], *args: Any) -> Any:
        def run(*inputs: Any) -> Any:
            modules = [] if noise else [submodule for submodule in module.modules() if submodule.training]
            with exchanged(implementation + [(submodule, "training", False) for submodule in modules]):
                return forward(*inputs)

        return checkpointing(run, *args)

    return apply


_Values = list[tuple[Any, str, Any]]
"""Objects, names of their attributes, and values for these."""


@contextmanager
def exchanged(values: _Values) -> Iterator[None]:
    """Set attributes within the context, and then their previous values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
