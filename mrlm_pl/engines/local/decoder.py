"""The arithmetic of a Llama-like decoder in generation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.engines.local.generation import Backend
from mrlm_pl.engines.local.llama_weights import LayerWeights, Sizes, StepWeights
from mrlm_pl.policy.forward.half_precision import attention_dtype
from mrlm_pl.policy.forward.kernel_shapes import bucket, kernels_by_shape

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


def through_layer(
    w: Sizes,
    between: torch.dtype,
    layer: LayerWeights[Any],
    x: Tensor,
    shape: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the residual stream ``x`` ``[N, hidden size]`` of N tokens in this shape after one layer.

    ``between`` is :attr:`Decoder.attention_dtype`; for the others see :meth:`Decoder.hidden`.
    """
    rotated = w.heads + w.kv_heads
    h = rms_norm(x, layer.attention_norm, w.eps).to(w.dtype)
    qkv = layer.qkv.of(h).to(between).contiguous()
    qkv = qkv.view(*shape, rotated + w.kv_heads, w.head_dim)
    qk = qkv[..., :rotated, :]
    if layer.qk_norm is not None:
        qk = rms_norm(qk, layer.qk_norm, w.eps)
    qk = torch.addcmul(qk * cos, qk.roll(w.head_dim // 2, -1), sin).to(between)
    mixed = attend(qk[..., : w.heads, :], qk[..., w.heads :, :], qkv[..., rotated:, :])
    x = layer.out.added(x, mixed.reshape(x.shape[0], -1).to(w.dtype))
    h = rms_norm(x, layer.mlp_norm, w.eps).to(w.dtype)
    gate, up = layer.gate_up.of(h).to(between).chunk(2, -1)
    return layer.down.added(x, F.silu(gate).mul_(up).to(w.dtype))


class Decoder(Backend):
    """The arithmetic of a Llama-like decoder.

    Attributes:
        weights: of the present rows.
    """

    weights: StepWeights

    def rounded(self, count: int) -> int:
        """Return a number of rows or tokens, rounded up where a CPU makes a kernel for every new shape."""
        return bucket(count) if kernels_by_shape(self.device, self.weights.dtype) else count

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype of keys, values and element-wise results between two projections."""
        return attention_dtype(self.weights.dtype, self.device)

    @abstractmethod
    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines ``[>= length, head size]``; the first half of the sines is negated."""

    def grouped_queries(self, q: Tensor) -> Tensor:
        """Return queries ``[B, heads, head size]`` scaled, as ``[B, KV heads, group, head size]``."""
        w = self.weights
        return q.reshape(len(q), w.kv_heads, w.heads // w.kv_heads, w.head_dim) * w.scale

    def hidden(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after the last layer, shape ``[*ids.shape, hidden size]``.

        ``cos`` and ``sin`` broadcast against ``[*ids.shape, heads, head size]``. ``attend`` gets the layer's index,
        queries, keys and values ``[*ids.shape, heads, head size]`` and returns the queries' shape.
        """
        w, between = self.weights, self.attention_dtype
        x = w.embed(ids.flatten())
        for i, layer in enumerate(w.layers):
            x = through_layer(w, between, layer, x, ids.shape, cos, sin, partial(attend, i))
        return x.view(*ids.shape, -1)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of a residual stream ``[B, hidden size]``."""
        w = self.weights
        return w.head.of(rms_norm(x, w.norm, w.eps).to(w.dtype))
