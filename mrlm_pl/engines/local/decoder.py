"""A Llama-like decoder in generation: its weights, read from a policy, and its arithmetic."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mrlm_pl.engines.local.generation import Backend
from mrlm_pl.policy.forward import products
from mrlm_pl.policy.forward.attention import MASK_ELEMENTS, grouped_attention
from mrlm_pl.policy.forward.devices import attention_dtype, bucket, kernels_by_shape
from mrlm_pl.policy.sharding import whole

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Linear(Protocol):
    """A linear layer."""

    def apply(self, h: Tensor) -> Tensor:
        """Return ``h`` ``[N, in]`` through the layer, ``[N, out]``."""

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """Return ``x + apply(h)``."""


LinearT = TypeVar("LinearT", bound=Linear)


class Affine(NamedTuple):
    """A linear layer: weight ``[out, in]``, or a packed copy of it, and bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None

    def apply(self, h: Tensor) -> Tensor:
        """Return ``h @ weight.T + bias``, ``[N, out]``; in bf16 on a CPU the transpose of a contiguous result.

        With few rows and many features such a product splits its work over the first dimension of the result, and takes
        0.7 to 0.8 of the time when that is the features. Element-wise operations keep the layout.
        """
        if self.weight.is_mkldnn or not self._feature_major:
            return (products.linear if products.ONEDNN_IS_FASTER else F.linear)(h, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(self.weight, h.t()).t()
        return torch.addmm(self.bias[:, None], self.weight, h.t()).t()

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """Return ``x + h @ weight.T + bias``, in one kernel where the dtypes allow it."""
        if self.bias is not None or x.dtype != h.dtype or (products.ONEDNN_IS_FASTER and h.device.type == "cpu"):
            return x + self.apply(h)
        if not self._feature_major:
            return torch.addmm(x, h, self.weight.t())
        return torch.addmm(x.t(), self.weight, h.t()).t()

    @property
    def _feature_major(self) -> bool:
        dtype = self.weight.dtype
        return self.weight.device.type == "cpu" and dtype.is_floating_point and dtype != torch.float32


def storage_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in the same memory; a packed tensor has its identity."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()


def input_major(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products with few rows are fastest with the weight's memory as ``[in, out]``.

    In float32 on a CPU with AVX-512, products with 2 to 8 rows then take half the time, and those with 32 rows 0.95
    (widths of 256 to 1376; with AVX2 0.9 to 1.1). In bf16 they would take 1.3 times as long.
    """
    return device.type == "cpu" and dtype == torch.float32


def read_affine(module: Any, adapters: bool = True) -> Affine:
    """Return the current weight and bias of a linear, norm or embedding module, detached and not copied.

    Those of a tensor-parallel module are gathered from all ranks, and a low-rank adapter is added; these are copies.
    Without ``adapters`` the weight is that below the adapter.
    """
    layer = module if adapters else getattr(module, "base_layer", module)
    weight, bias = whole(layer.weight.detach()), getattr(layer, "bias", None)
    return Affine(weight, None if bias is None else whole(bias.detach()))


def _in_place(module: nn.Module, adapters: bool) -> bool:
    """Return whether `read_affine` gives the module's own memory, and no sum or gathered copy."""
    return not (adapters and hasattr(module, "base_layer")) and not isinstance(module.weight, DTensor)


@dataclass
class LayerWeights(Generic[LinearT]):
    """Weights of one decoder layer: projections in the compute dtype, norms in the module's."""

    attention_norm: Tensor
    qkv: LinearT
    qk_norm: Tensor | None
    out: LinearT
    mlp_norm: Tensor
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True)
class Sizes:
    """Sizes and precision of a layer, without its weights.

    Args:
        dtype: dtype of the projections.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: size of a head.
        scale: scale of the attention scores.
        eps: epsilon of the norms.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float


class StepWeights(Protocol):
    """Weights that a step of a decoder reads."""

    sizes: Sizes
    norm: Tensor

    @property
    def layers(self) -> Sequence[LayerWeights[Any]]:
        """The decoder's layers."""

    @property
    def head(self) -> Linear:
        """The output head."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[N, hidden size]`` of tokens ``[N]``."""


class DecoderWeights:
    """The weights of a Llama-like decoder, laid out for generation: Q, K, V in one matrix, gate and up in another.

    Fused matrices are copies in the compute dtype, those with an adapter are sums, and in float32 on a CPU all matrices
    of the layers are copies with their inputs first (:func:`input_major`); all these keep their memory from one
    :meth:`read` to the next, and may be packed (:func:`~mrlm_pl.policy.forward.products.packed`), as is the head in
    float32 where packing is faster. All other weights refer to the module's own memory when their dtype is the compute
    dtype; norms and the token embedding always do. With ``own`` nothing refers to the module's memory, so that the
    module may change between two reads.

    Args:
        model: a model for which :func:`~mrlm_pl.engines.local.llama.unsupported_reason` is None.
        dtype: compute dtype of the projections and of the head.
        own: copy all weights.
        adapters: add low-rank adapters; False reads the weights below them.

    Attributes:
        architecture: sizes, precision and rotation that policies must share for a step together.
        copied: number of copied weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        own: bool = False,
        adapters: bool = True,
    ) -> None:
        config = model.config
        attention = model.model.layers[0].self_attn
        self.model = model
        self.own, self._adapters = own, adapters
        self.sizes = Sizes(
            dtype=dtype,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            eps=config.rms_norm_eps,
        )
        self._buffers: dict[str, Tensor] = {}
        self.read()

    @torch.no_grad()
    def read(self) -> None:
        """Read the module's current weights."""
        decoder = self.model.model
        self.embedding = self._keep("embedding", decoder.embed_tokens)
        self.device = self.embedding.device
        self.norm = self._keep("norm", decoder.norm)
        tied = self.model.lm_head.weight is decoder.embed_tokens.weight and self.embedding.dtype == self.sizes.dtype
        if self.own and tied and self.model.lm_head.bias is None:
            self.head = Affine(self.embedding, None)
        else:
            packs = products.ONEDNN_IS_FASTER and self.model.lm_head.weight.numel() >= products.PACKED
            turned = packs and input_major(self.device, self.sizes.dtype)
            self.head = self._fuse("head", turned, self.model.lm_head)
        self.layers = [self._read_layer(f"layer {i}", layer) for i, layer in enumerate(decoder.layers)]
        rotary = decoder.rotary_emb
        self.inverse_frequency = rotary.inv_freq.to(self.device, torch.float32)
        self.rotary_scale: float = rotary.attention_scaling
        first = self.layers[0]
        affine = (first.qkv, first.out, first.gate_up, first.down, self.head)
        shapes = tuple((tuple(a.weight.shape), a.weight.dtype, a.bias is None) for a in affine)
        rotation = (self.rotary_scale, tuple(self.inverse_frequency.tolist()))
        embedding = (self.embedding.dtype, self.device)
        layers = (len(self.layers), self.sizes, first.qk_norm is None)
        self.architecture: Hashable = (layers, shapes, rotation, embedding)
        self.copied = sum(buffer.numel() for buffer in self._buffers.values())

    def free(self) -> None:
        """Free all copies until the next :meth:`read`; until then there are no layers."""
        self._buffers.clear()
        self.layers, self.head, self.copied = [], Affine(self.embedding, None), 0

    def tensors(self) -> list[Tensor]:
        """Return all weights, in one order."""
        weights = [self.embedding, self.norm, *self.head]
        for layer in self.layers:
            for weight in vars(layer).values():
                weights += weight if isinstance(weight, Affine) else [weight]
        return [tensor for tensor in weights if tensor is not None]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[N, hidden size]`` of tokens ``[N]``."""
        return F.embedding(ids, self.embedding)

    def _read_layer(self, name: str, layer: Any) -> LayerWeights[Affine]:
        attention, mlp = layer.self_attn, layer.mlp
        turned = input_major(self.device, self.sizes.dtype)
        qk_norm = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = read_affine(attention.q_norm)[0], read_affine(attention.k_norm)[0]
            rows = [q_norm.expand(self.sizes.heads, -1), k_norm.expand(self.sizes.kv_heads, -1)]
            qk_norm = self._hold(f"{name} qk_norm", rows, q_norm.dtype, lasting=False)
        return LayerWeights(
            attention_norm=self._keep(f"{name} attention_norm", layer.input_layernorm),
            qkv=self._fuse(f"{name} qkv", turned, attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=qk_norm,
            out=self._fuse(f"{name} out", turned, attention.o_proj),
            mlp_norm=self._keep(f"{name} mlp_norm", layer.post_attention_layernorm),
            gate_up=self._fuse(f"{name} gate_up", turned, mlp.gate_proj, mlp.up_proj),
            down=self._fuse(f"{name} down", turned, mlp.down_proj),
        )

    def _keep(self, name: str, module: nn.Module) -> Tensor:
        """Return the weight of a module in its own dtype."""
        weight, _ = read_affine(module)
        return self._hold(name, [weight], weight.dtype, _in_place(module, self._adapters))

    def _fuse(self, name: str, turned: bool, *modules: nn.Module) -> Affine:
        """Return weight and bias of the modules stacked along the output, in the compute dtype.

        Args:
            name: name of the memory in this object.
            turned: whether the memory of the weight is ``[in, out]``; see :func:`input_major`.
            modules: linear modules.
        """
        pairs = [read_affine(module, self._adapters) for module in modules]
        lasting = len(modules) == 1 and _in_place(modules[0], self._adapters)
        dtype = self.sizes.dtype
        weight = self._hold(name, [weight for weight, _ in pairs], dtype, lasting, turned, pack=True)
        biases = [bias for _, bias in pairs if bias is not None]
        return Affine(weight, self._hold(f"{name} bias", biases, dtype, lasting) if biases else None)

    def _hold(
        self,
        name: str,
        parts: list[Tensor],
        dtype: torch.dtype,
        lasting: bool,
        turned: bool = False,
        pack: bool = False,
    ) -> Tensor:
        """Return the parts stacked, in memory of this object unless they are one ``lasting`` tensor of the dtype.

        Args:
            name: name of the memory.
            parts: the tensors to stack.
            dtype: dtype of the result.
            lasting: whether the first part stays where it is until the next :meth:`read`.
            turned: whether the memory holds the transpose; it then always belongs to this object.
            pack: whether this object's memory is packed where that is faster.
        """
        if lasting and parts[0].dtype == dtype and not self.own and not turned:
            return parts[0]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        buffer = self._buffers.get(name)
        if buffer is not None and (buffer.shape != shape or buffer.device != parts[0].device):
            buffer = None
        packed = products.packed(parts, dtype) if pack and products.ONEDNN_IS_FASTER else None
        if packed is not None:
            buffer = self._buffers[name] = packed if buffer is None else buffer.copy_(packed)
            return buffer
        if buffer is None:
            empty = torch.empty(shape[::-1] if turned else shape, dtype=dtype, device=parts[0].device)
            buffer = self._buffers[name] = empty.t() if turned else empty
        row = 0
        for part in parts:
            buffer[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return buffer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, with float32 statistics.

    RMSNorm (arXiv 1910.07467).

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0).tolist()    # sqrt(12.5) = 3.5355
    [0.8485281467437744, 2.262741804122925]
    """
    if x.device.type != "cpu":
        if weight.dim() == 1 and weight.dtype == x.dtype == torch.float32:  # other dtypes round before the product
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
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
    qkv = layer.qkv.apply(h).to(between).contiguous()
    qkv = qkv.view(*shape, rotated + w.kv_heads, w.head_dim)
    qk = qkv[..., :rotated, :]
    if layer.qk_norm is not None:
        qk = rms_norm(qk, layer.qk_norm, w.eps)
    qk = torch.addcmul(qk * cos, qk.roll(w.head_dim // 2, -1), sin).to(between)
    mixed = attend(qk[..., : w.heads, :], qk[..., w.heads :, :], qkv[..., rotated:, :])
    x = layer.out.add_to(x, mixed.reshape(x.shape[0], -1).to(w.dtype))
    h = rms_norm(x, layer.mlp_norm, w.eps).to(w.dtype)
    gate, up = layer.gate_up.apply(h).to(between).chunk(2, -1)
    return layer.down.add_to(x, F.silu(gate).mul_(up).to(w.dtype))


def causal_attention(states: Tensor, scale: float, positions: Tensor | None) -> Attend:
    """Return causal attention of new tokens over them and earlier ones, for :meth:`Decoder.hidden`.

    Args:
        states: keys and values, ``[layers, 2, u, KV heads, T, head size]``; receives those of the new tokens.
        scale: scale of the attention scores.
        positions: positions of the new tokens, ``[u, new]``. None: they are whole contexts, with padding on the right,
            which is never attended to.
    """
    if positions is None:

        def attend_whole(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = states[i]
            keys.copy_(k.transpose(1, 2))
            values.copy_(v.transpose(1, 2))
            return grouped_attention(q.transpose(1, 2), keys, values, scale).transpose(1, 2)

        return attend_whole

    columns = torch.arange(states.shape[4], device=states.device)
    rows = torch.arange(len(positions), device=states.device)[:, None]
    # a mask of all new tokens grows with their number times that of all tokens
    position_chunks = positions.split(max(1, MASK_ELEMENTS // (len(positions) * len(columns))), 1)
    masks = [columns <= position_chunks[0][:, None, :, None]] if len(position_chunks) == 1 else None

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = states[i]
        keys[rows, :, positions] = k
        values[rows, :, positions] = v
        out = [
            grouped_attention(part_q.transpose(1, 2), keys, values, scale, mask)
            for part_q, mask in zip(
                q.split(position_chunks[0].shape[1], 1),
                masks or (columns <= chunk[:, None, :, None] for chunk in position_chunks),
                strict=True,
            )
        ]
        return torch.cat(out, 2).transpose(1, 2)

    return attend


class Decoder(Backend):
    """The arithmetic of a Llama-like decoder.

    Args:
        device: device of the tensors.
        dtype: dtype of the projections.

    Attributes:
        weights: weights of the present rows.
        attention_dtype: dtype of keys, values and element-wise results between two projections.
        rounded: returns a number of rows or tokens, rounded up where a CPU makes a kernel for every new shape.
    """

    weights: StepWeights

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.asynchronous = device, device.type == "cuda"
        self.attention_dtype = attention_dtype(dtype, device)
        self.rounded: Callable[[int], int] = bucket if kernels_by_shape(device, dtype) else int  # int changes nothing

    @abstractmethod
    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines ``[>= length, head size]``; the first half of the sines is negated."""

    def hidden(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after the last layer, shape ``[*ids.shape, hidden size]``.

        ``cos`` and ``sin`` broadcast against ``[*ids.shape, heads, head size]``. ``attend`` gets the layer's index,
        queries, keys and values ``[*ids.shape, heads, head size]`` and returns the queries' shape.
        """
        w = self.weights
        x = w.embed(ids.flatten())
        for i, layer in enumerate(w.layers):
            x = through_layer(w.sizes, self.attention_dtype, layer, x, ids.shape, cos, sin, partial(attend, i))
        return x.view(*ids.shape, -1)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of a residual stream ``[B, hidden size]``."""
        w = self.weights
        return w.head.apply(rms_norm(x, w.norm, w.sizes.eps).to(w.sizes.dtype))
