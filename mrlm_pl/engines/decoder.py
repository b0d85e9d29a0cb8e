"""A decode step for the Llama family that spends its time on arithmetic instead of on modules and cache objects.

Against ``model.forward`` it fuses projections, writes keys and values in place, never repeats them for grouped
queries, computes logits at last positions only and needs no attention mask where the rows are equally long.
Precision follows ``torch.autocast``: projections and attention in the compute dtype, residual stream and norms in
the module's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mrlm_pl.engines.backend import Backend, Context, Rows
from mrlm_pl.engines.weights import DecoderWeights, LayerWeights

_GROWTH = 64
_PREFILL_TOKENS = 8192
_PADDING_SHARE = 0.25

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, with float32 statistics (arXiv 1910.07467).

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0).tolist()    # sqrt(12.5) = 3.5355
    [0.8485281467437744, 2.262741804122925]
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return (x * scale).to(x.dtype) * weight


class FusedDecoder(Backend):
    """Llama, Qwen2, Qwen3 and Mistral models, from :class:`~mrlm_pl.engines.weights.DecoderWeights`.

    Args:
        model: a model for which :func:`~mrlm_pl.engines.weights.unsupported_reason` is None.
        dtype: compute dtype.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.weights = DecoderWeights(model, dtype)
        self.device = self.weights.device
        self._cos = self._sin = torch.empty(0)

    def refresh(self) -> None:
        """Take over the current weights of the module."""
        self.weights.read()
        self.device = self.weights.device
        self._cos = self._sin = torch.empty(0)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[>= length, head size]``; the first half of the sines is negated."""
        if len(self._cos) < length:
            frequency, scale = self.weights.inverse_frequency, self.weights.rotary_scale
            angles = torch.outer(torch.arange(length + _PREFILL_TOKENS, device=self.device).float(), frequency)
            dtype = self.weights.embedding.dtype
            cos, sin = angles.cos().mul_(scale).to(dtype), angles.sin().mul_(scale).to(dtype)
            self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._cos, self._sin

    def hidden(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Residual stream after the last layer, shape ``[*ids.shape, hidden size]``.

        ``cos`` and ``sin`` broadcast against ``[*ids.shape, heads, head size]``. ``attend`` gets the layer's index,
        queries, keys and values ``[*ids.shape, heads, head size]`` and returns the queries' shape.
        """
        w = self.weights
        x = F.embedding(ids.flatten(), w.embedding)
        rotated = w.heads + w.kv_heads
        for i, layer in enumerate(w.layers):
            h = rms_norm(x, layer.attention_norm, w.eps).to(w.dtype)
            qkv = _linear(h, layer.qkv, layer.qkv_bias).contiguous()
            qkv = qkv.view(*ids.shape, rotated + w.kv_heads, w.head_dim)
            qk = self._rotate(qkv[..., :rotated, :], layer, cos, sin)
            mixed = attend(i, qk[..., : w.heads, :], qk[..., w.heads :, :], qkv[..., rotated:, :])
            x = _add_linear(x, mixed.reshape(x.shape[0], -1), layer.out, layer.out_bias)
            h = rms_norm(x, layer.mlp_norm, w.eps).to(w.dtype)
            gate, up = _linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return x.view(*ids.shape, -1)

    def _rotate(self, qk: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> Tensor:
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, self.weights.eps)
        return torch.addcmul(qk * cos, qk.roll(self.weights.head_dim // 2, -1), sin).to(self.weights.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Logits ``[B, V]`` of a residual stream ``[B, hidden size]``."""
        w = self.weights
        return _linear(rms_norm(x, w.norm, w.eps).to(w.dtype), w.head, w.head_bias)

    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Logits ``[U, V]`` after each context, and rows that continue them; see :class:`Backend`."""
        rows = DecoderRows(self, [len(c.token_ids) for c in contexts for _ in range(c.rows)], reserve)
        first = [0]
        for context in contexts:
            first.append(first[-1] + context.rows)
        logits: list[Tensor] = [torch.empty(0)] * len(contexts)
        for chunk in _chunks(contexts):
            chunk_logits, states = self._prefill_chunk([contexts[j] for j in chunk])
            for u, j in enumerate(chunk):
                rows.fill(range(first[j], first[j + 1]), states[:, :, u, :, : len(contexts[j].token_ids)])
                logits[j] = chunk_logits[u]
        return torch.stack(logits), rows

    def _prefill_chunk(self, contexts: Sequence[Context]) -> tuple[Tensor, Tensor]:
        """Logits ``[u, V]`` and keys and values ``[layers, 2, u, KV heads, T, head size]``, rows left-aligned."""
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
            x = self.hidden(ids, cos[:width, None], sin[:width, None], self._attend_fresh(states))
        else:
            positions = torch.tensor(offsets, device=self.device)[:, None] + torch.arange(width, device=self.device)
            attend = self._attend_resumed(states, positions)
            x = self.hidden(ids, cos[positions][:, :, None], sin[positions][:, :, None], attend)
        last = torch.tensor([len(tokens) - 1 for tokens in new], device=self.device)
        return self.logits(x[torch.arange(len(new), device=self.device), last]), states

    def _attend_fresh(self, states: Tensor) -> Attend:
        """Causal attention of whole contexts; what is right of a row's end is never looked at by what is left."""
        scale = self.weights.scale

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = states[i]
            keys.copy_(k.transpose(1, 2))
            values.copy_(v.transpose(1, 2))
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2)

        return attend

    def _attend_resumed(self, states: Tensor, positions: Tensor) -> Attend:
        """Causal attention of new tokens at ``positions`` ``[u, T]`` over them and what is in ``states`` before."""
        scale = self.weights.scale
        visible = torch.arange(states.shape[4], device=self.device) <= positions[:, None, :, None]
        rows = torch.arange(len(positions), device=self.device)[:, None]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = states[i]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=visible, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2)

        return attend


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``h @ weight.T + bias``, ``[N, out]``; on a CPU the result is feature-major, the transpose of a contiguous one.

    With few rows and many features the CPU's matrix product splits its work over the first dimension of the result,
    and it is up to twice as fast when that is the features. Element-wise operations keep the layout.
    """
    if h.device.type != "cpu":
        return F.linear(h, weight, bias)
    if bias is None:
        return torch.mm(weight, h.t()).t()
    return torch.addmm(bias[:, None], weight, h.t()).t()


def _add_linear(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x + h @ weight.T + bias``, in one kernel where the dtypes allow it."""
    if bias is not None or x.dtype != h.dtype:
        return x + _linear(h, weight, bias)
    if h.device.type != "cpu":
        return torch.addmm(x, h, weight.t())
    return torch.addmm(x.t(), weight, h.t()).t()


def _chunks(contexts: Sequence[Context]) -> Iterator[list[int]]:
    """Indices of contexts to prefill together: fresh apart from resumed, similar in length, bounded in tokens."""
    new = [len(context.token_ids) - context.cached for context in contexts]
    order = sorted(range(len(contexts)), key=lambda j: (contexts[j].cached > 0, new[j]))
    chunk: list[int] = []
    for j in order:
        if chunk:
            full = (len(chunk) + 1) * new[j] > _PREFILL_TOKENS
            padding = 1 - sum(new[c] for c in [*chunk, j]) / ((len(chunk) + 1) * new[j])
            kind = (contexts[chunk[0]].cached > 0) != (contexts[j].cached > 0)
            if full or kind or padding > _PADDING_SHARE:
                yield chunk
                chunk = []
        chunk.append(j)
    if chunk:
        yield chunk


class DecoderRows(Rows):
    """Rows of a :class:`FusedDecoder`, right-aligned in one tensor ``[layers, 2, B, KV heads, capacity, head size]``.

    All rows end at the same column, so a new token's keys and values are one slice write and a mask is needed only
    where rows differ in length.

    Args:
        decoder: the weights and the arithmetic.
        lengths: context length of each row.
        reserve: tokens that will be appended at most.
    """

    def __init__(self, decoder: FusedDecoder, lengths: Sequence[int], reserve: int) -> None:
        self._decoder = decoder
        self._end = max(lengths)
        self._starts = [self._end - length for length in lengths]
        self._allocate(len(lengths), self._end + min(reserve, _GROWTH))
        self._align()

    def _allocate(self, rows: int, capacity: int) -> None:
        w = self._decoder.weights
        shape = (len(w.layers), 2, rows, w.kv_heads, capacity, w.head_dim)
        self._use(torch.zeros(shape, dtype=w.dtype, device=w.device))

    def _use(self, states: Tensor) -> None:
        self._states = states
        self._layers = [(layer[0], layer[1]) for layer in states]

    def _align(self) -> None:
        """Recompute what depends on where rows start."""
        self._low = min(self._starts)
        self._mask: Tensor | None = None
        if max(self._starts) > self._low:
            starts = torch.tensor(self._starts, device=self._decoder.device)
            self._start_of_row = starts
            hidden = torch.arange(self._states.shape[4], device=starts.device) < starts[:, None, None, None]
            mask = torch.zeros(hidden.shape, dtype=self._states.dtype, device=starts.device)
            self._mask = mask.masked_fill_(hidden, float("-inf"))

    def fill(self, rows: range, states: Tensor) -> None:
        """Write one context's keys and values ``[layers, 2, KV heads, T, head size]`` into each of ``rows``."""
        self._states[:, :, rows.start : rows.stop, :, self._starts[rows.start] : self._end] = states[:, :, None]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after ``tokens`` ``[B]``."""
        if self._end == self._states.shape[4]:
            self._grow()
        decoder, end, low = self._decoder, self._end, self._low
        cos, sin = decoder.rotation(end - low + 1)
        if self._mask is None:
            mask, cos, sin = None, cos[end - low], sin[end - low]
        else:
            position = end - self._start_of_row
            mask, cos, sin = self._mask[..., low : end + 1], cos[position][:, None], sin[position][:, None]
        w = decoder.weights
        grouped = (len(tokens), w.kv_heads, w.heads // w.kv_heads, w.head_dim)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._layers[i]
            keys.select(2, end).copy_(k)
            values.select(2, end).copy_(v)
            keys, values = keys[:, :, low : end + 1], values[:, :, low : end + 1]
            # The query heads of a group take the place of query positions, so keys and values are not repeated.
            return F.scaled_dot_product_attention(q.reshape(grouped), keys, values, attn_mask=mask, scale=w.scale)

        x = decoder.hidden(tokens, cos, sin, attend)
        self._end += 1
        return decoder.logits(x)

    def _grow(self) -> None:
        old = self._states
        self._allocate(old.shape[2], self._end + max(_GROWTH, self._end // 4))
        self._states[..., : self._end, :] = old[..., : self._end, :]
        self._align()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows``."""
        self._use(self._states[:, :, torch.tensor(rows, device=self._decoder.device)])
        self._starts = [self._starts[b] for b in rows]
        self._align()

    def states(self, row: int, length: int) -> Tensor:
        """A copy of the keys and values of a row's first ``length`` tokens."""
        start = self._starts[row]
        return self._states[:, :, row, :, start : start + length].clone()
