"""A decode step for the Llama family, without the overhead of modules and cache objects.

Against ``model.forward`` it fuses projections, writes keys and values in place, never repeats them for grouped queries
or for the rows of a shared context, computes logits at last positions only and needs no attention mask where the
contexts are equally long.
Precision follows ``torch.autocast``: projections and attention in the compute dtype, residual stream and norms in
the module's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mrlm_pl.engines.local.context_attention import (
    ContextRows,
    Seen,
    attention,
    hidden_beyond,
    places_in_contexts,
)
from mrlm_pl.engines.local.generation import Backend, Context
from mrlm_pl.engines.local.llama_weights import DecoderWeights, LayerWeights
from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.lora import adapted_weight

# Context tokens fed at once. On a CPU a thousand are enough for full speed; a GPU needs taller matrix products.
_PREFILL_TOKENS_CPU = 1024
_PREFILL_TOKENS_ACCELERATOR = 8192
_ROTATION_SLACK = 1024
_PADDING_SHARE = 0.25
_FEW_ROWS = 8

_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, with float32 statistics.

    RMSNorm (arXiv 1910.07467).

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0).tolist()    # sqrt(12.5) = 3.5355
    [0.8485281467437744, 2.262741804122925]
    """
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return (x * scale).to(x.dtype) * weight


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why :class:`FusedDecoder` cannot hold ``model``, or None if it can.

    It holds the Llama, Qwen2, Qwen3 and Mistral families with dense ``nn.Linear`` projections, full attention, SiLU
    and rotary embeddings whose frequencies do not depend on the length.
    """
    config = model.config
    if config.model_type not in _FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not 'silu'"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is not None and sliding and window < config.max_position_embeddings:
        return f"sliding window attention over {window} tokens"
    rotary = model.model.rotary_emb
    if rotary.rope_type not in _STATIC_ROTARY:
        return f"rotary embedding of type {rotary.rope_type!r}"
    if 2 * rotary.inv_freq.numel() != model.model.layers[0].self_attn.head_dim:
        return "rotary embedding of a part of the head"
    dense = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        dense += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        dense += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    for module in dense:
        if type(module) is not nn.Linear and adapted_weight(module) is None:
            return f"a projection of type {type(module).__name__} instead of Linear"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"parameters on several devices: {', '.join(sorted(map(str, devices)))}"
    return None


class FusedDecoder(Backend):
    """Llama, Qwen2, Qwen3 and Mistral models, from :class:`~mrlm_pl.engines.local.llama_weights.DecoderWeights`.

    Args:
        model: a model for which :func:`unsupported_reason` is None.
        dtype: compute dtype.
        own: copy all weights, so that the module may change between two calls of :meth:`refresh`.

    Attributes:
        rows: makes the rows of a batch.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, own: bool = False) -> None:
        self.weights = DecoderWeights(model, dtype, own)
        self.rows: MakeRows = DecoderRows
        self._forget_rotation()

    def refresh(self) -> None:
        """Read the current weights of the module."""
        before = self._frequency
        self.weights.read()
        now = self.weights.inverse_frequency
        if before.device != now.device or not torch.equal(before, now):
            self._forget_rotation()

    def _forget_rotation(self) -> None:
        self.device = self.weights.device
        self.asynchronous = self.device.type != "cpu"
        self._frequency = self.weights.inverse_frequency.clone()
        self._cos = self._sin = torch.empty(0)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines ``[>= length, head size]``; the first half of the sines is negated."""
        if len(self._cos) < length:
            scale = self.weights.rotary_scale
            angles = torch.outer(torch.arange(length + _ROTATION_SLACK, device=self.device).float(), self._frequency)
            dtype = self.weights.embedding.dtype
            cos, sin = angles.cos().mul_(scale).to(dtype), angles.sin().mul_(scale).to(dtype)
            self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._cos, self._sin

    def addresses(self) -> tuple[int, ...]:
        """Return where in memory all tensors lie that a step reads beside the rows' own."""
        return tuple(tensor.data_ptr() for tensor in (*self.weights.tensors(), self._cos, self._sin))

    def grouped_queries(self, q: Tensor) -> Tensor:
        """Return queries ``[B, heads, head size]`` scaled, as ``[B, KV heads, group, head size]``."""
        w = self.weights
        return q.reshape(len(q), w.kv_heads, w.heads // w.kv_heads, w.head_dim) * w.scale

    def hidden(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after the last layer, shape ``[*ids.shape, hidden size]``.

        ``cos`` and ``sin`` broadcast against ``[*ids.shape, heads, head size]``. ``attend`` gets the layer's index,
        queries, keys and values ``[*ids.shape, heads, head size]`` and returns the queries' shape.
        """
        w = self.weights
        x = F.embedding(ids.flatten(), w.embedding)
        rotated = w.heads + w.kv_heads
        for i, layer in enumerate(w.layers):
            h = rms_norm(x, layer.attention_norm, w.eps).to(w.dtype)
            qkv = _linear(h, *layer.qkv).contiguous()
            qkv = qkv.view(*ids.shape, rotated + w.kv_heads, w.head_dim)
            qk = self._rotate(qkv[..., :rotated, :], layer, cos, sin)
            mixed = attend(i, qk[..., : w.heads, :], qk[..., w.heads :, :], qkv[..., rotated:, :])
            x = _add_linear(x, mixed.reshape(x.shape[0], -1), *layer.out)
            h = rms_norm(x, layer.mlp_norm, w.eps).to(w.dtype)
            gate, up = _linear(h, *layer.gate_up).chunk(2, -1)
            x = _add_linear(x, F.silu(gate).mul_(up), *layer.down)
        return x.view(*ids.shape, -1)

    def _rotate(self, qk: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> Tensor:
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, self.weights.eps)
        return torch.addcmul(qk * cos, qk.roll(self.weights.head_dim // 2, -1), sin).to(self.weights.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of a residual stream ``[B, hidden size]``."""
        w = self.weights
        return _linear(rms_norm(x, w.norm, w.eps).to(w.dtype), *w.head)

    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, ContextRows]:
        """Return logits ``[U, V]`` after each context, and rows that continue them; see :class:`Backend`."""
        logits: list[Tensor] = [torch.empty(0)] * len(contexts)
        lengths = [len(context.token_ids) for context in contexts]
        rows = self.rows(self, lengths, [context.rows for context in contexts], reserve)
        for chunk in _chunks(contexts, self.device):
            chunk_logits, states = self._prefill_chunk([contexts[j] for j in chunk])
            for u, j in enumerate(chunk):
                rows.shared[:, :, j, :, : lengths[j]] = states[:, :, u, :, : lengths[j]]
                logits[j] = chunk_logits[u]
        return torch.stack(logits), rows

    def _prefill_chunk(self, contexts: Sequence[Context]) -> tuple[Tensor, Tensor]:
        """Return logits ``[u, V]``, and keys and values ``[layers, 2, u, KV heads, T, head size]``, left-aligned."""
        w = self.weights
        offsets = [context.cached for context in contexts]
        new = [list(context.token_ids[context.cached :]) for context in contexts]
        width = max(map(len, new))
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], device=self.device)
        capacity = max(offsets) + width
        shape = (len(w.layers), 2, len(contexts), w.kv_heads, capacity, w.head_dim)
        states = torch.zeros(shape, dtype=w.dtype, device=self.device)
        for u, context in enumerate(contexts):
            if context.states is not None:
                states[:, :, u, :, : context.cached] = context.states
        cos, sin = self.rotation(capacity)
        if max(offsets) == 0:
            x = self.hidden(ids, cos[:width, None], sin[:width, None], self._attention(states, None))
        else:
            positions = torch.tensor(offsets, device=self.device)[:, None] + torch.arange(width, device=self.device)
            attend = self._attention(states, positions)
            x = self.hidden(ids, cos[positions][:, :, None], sin[positions][:, :, None], attend)
        last = torch.tensor([len(tokens) - 1 for tokens in new], device=self.device)
        return self.logits(x[torch.arange(len(new), device=self.device), last]), states

    def _attention(self, states: Tensor, positions: Tensor | None) -> Attend:
        """Return causal attention of new tokens at ``positions`` ``[u, T]`` over them and earlier ``states``.

        Without positions the tokens are whole contexts; their padding on the right is never attended to.
        """
        visible = rows = None
        if positions is not None:
            visible = torch.arange(states.shape[4], device=self.device) <= positions[:, None, :, None]
            rows = torch.arange(len(positions), device=self.device)[:, None]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = states[i]
            if positions is None:
                keys.copy_(k.transpose(1, 2))
                values.copy_(v.transpose(1, 2))
            else:
                keys[rows, :, positions] = k
                values[rows, :, positions] = v
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys,
                values,
                attn_mask=visible,
                is_causal=positions is None,
                scale=self.weights.scale,
                enable_gqa=True,
            )
            return out.transpose(1, 2)

        return attend


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``h @ weight.T + bias``, ``[N, out]``; on a CPU feature-major: the transpose of a contiguous result.

    With few rows and many features the CPU's matrix product splits its work over the first dimension of the result,
    and it is up to twice as fast when that is the features. Element-wise operations keep the layout.
    """
    if h.device.type != "cpu":
        return F.linear(h, weight, bias)
    h = _row_major_if_few(h)
    if bias is None:
        return torch.mm(weight, h.t()).t()
    return torch.addmm(bias[:, None], weight, h.t()).t()


def _add_linear(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x + h @ weight.T + bias``, in one kernel where the dtypes allow it."""
    if bias is not None or x.dtype != h.dtype:
        return x + _linear(h, weight, bias)
    if h.device.type != "cpu":
        return torch.addmm(x, h, weight.t())
    return torch.addmm(x.t(), weight, _row_major_if_few(h).t()).t()


def _row_major_if_few(h: Tensor) -> Tensor:
    """Return ``h`` ``[N, in]`` in the layout that the CPU's matrix product reads fastest.

    For 2 to 8 rows in float32 it has a kernel that takes a third of the time (measured with widths of 256 to 1376, by
    the memory's bandwidth then), if each row's features lie side by side; above that the layout makes no difference.
    """
    return h.contiguous() if h.dtype == torch.float32 and 2 <= len(h) <= _FEW_ROWS else h


def _chunks(contexts: Sequence[Context], device: torch.device) -> Iterator[list[int]]:
    """Yield indices of contexts to prefill together: fresh apart from resumed, similar in length, bounded in tokens."""
    most = _PREFILL_TOKENS_CPU if device.type == "cpu" else _PREFILL_TOKENS_ACCELERATOR
    new = [len(context.token_ids) - context.cached for context in contexts]
    order = sorted(range(len(contexts)), key=lambda j: (contexts[j].cached > 0, new[j]))
    chunk: list[int] = []
    for j in order:
        if chunk:
            full = (len(chunk) + 1) * new[j] > most
            padding = 1 - sum(new[c] for c in [*chunk, j]) / ((len(chunk) + 1) * new[j])
            kind = (contexts[chunk[0]].cached > 0) != (contexts[j].cached > 0)
            if full or kind or padding > _PADDING_SHARE:
                yield chunk
                chunk = []
        chunk.append(j)
    if chunk:
        yield chunk


class MakeRows(Protocol):
    """Makes the rows of a batch of a decoder, from the lengths of the contexts and the number of rows of each."""

    def __call__(
        self, decoder: FusedDecoder, lengths: Sequence[int], rows: Sequence[int], reserve: int
    ) -> ContextRows: ...


_GROWTH = 64


class DecoderRows(ContextRows):
    """Rows of a :class:`~mrlm_pl.engines.local.llama.FusedDecoder`, in tensors as small as possible.

    The keys and values of a context are held, and read in every step, once for all its rows. Those of the tokens fed
    since then are a tensor ``[layers, 2, B, KV heads, capacity, head size]`` of the rows: as all rows have been fed
    the same number of tokens, they are written to one column and need no mask.

    Args:
        decoder: the weights and the arithmetic.
        lengths: number of tokens of each context.
        rows: number of rows of each context.
        reserve: most tokens to append.
    """

    def __init__(self, decoder: FusedDecoder, lengths: Sequence[int], rows: Sequence[int], reserve: int) -> None:
        w = decoder.weights
        self._decoder = decoder
        shape = (len(w.layers), 2, len(lengths), w.kv_heads, max(lengths), w.head_dim)
        self.shared = torch.zeros(shape, dtype=w.dtype, device=decoder.device)
        self._lengths = list(lengths)
        self._contexts = [u for u, count in enumerate(rows) for _ in range(count)]
        self._fed = 0
        self._own = self._empty(len(self._contexts), max(1, min(reserve, _GROWTH)))
        self._arrange()

    def _empty(self, rows: int, capacity: int) -> Tensor:
        layers, pair, _, heads, _, size = self.shared.shape
        return self.shared.new_zeros(layers, pair, rows, heads, capacity, size)

    def _arrange(self) -> None:
        """Recompute the tensors that depend on the rows and contexts."""
        device = self.shared.device
        contexts = len(self._lengths)
        self._width = max(self._contexts.count(u) for u in range(contexts))
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
        """Return the attention of one new token per row over its context and its own tokens, ``[B, heads, head size]``.

        Its keys and values are written to their column first.
        """
        keys, values = self._own[i]
        keys.select(2, self._fed).copy_(k)
        values.select(2, self._fed).copy_(v)
        own = Seen(keys[:, :, : self._fed + 1], values[:, :, : self._fed + 1], None)
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
        self._own = self._own[:, :, on_device(rows, device)]
        contexts = [self._contexts[b] for b in rows]
        left = sorted(set(contexts))
        if len(left) < len(self._lengths):
            self._lengths = [self._lengths[u] for u in left]
            self.shared = self.shared[:, :, on_device(left, device), :, : max(self._lengths)]
        self._contexts = [left.index(u) for u in contexts]
        self._arrange()

    def states(self, row: int, length: int) -> Tensor:
        """Return a copy of the keys and values of a row's first ``length`` tokens."""
        context = self._contexts[row]
        own = length - self._lengths[context]
        first = self.shared[:, :, context, :, : self._lengths[context]]
        return torch.cat((first, self._own[:, :, row, :, :own]), dim=3)
