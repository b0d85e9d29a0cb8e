"""Weights of policies whose low-rank adapters are on one base: its matrices are held, and multiplied, once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrlm_pl.engines.local.decoder import Affine, DecoderWeights, LayerWeights
from mrlm_pl.policy.lora import adapter_factors, is_adapter


class Adapted(NamedTuple):
    """A linear layer of each of P policies with adapters on one base, for rows in the order of the policies.

    Args:
        base: layer that all policies share.
        a: first low-rank factors, ``[P, rank, in]``.
        b: second low-rank factors, ``[P, out, rank]``.
        counts: number of rows of each policy; None: there is one policy.
    """

    base: Affine
    a: Tensor
    b: Tensor
    counts: list[int] | None = None

    @property
    def weight(self) -> Tensor:
        """The base's weight."""
        return self.base.weight

    def apply(self, h: Tensor) -> Tensor:
        """Return each row of ``h`` ``[N, in]`` through its policy's layer, ``[N, out]``; see :meth:`Affine.apply`."""
        return self.base.apply(h) + self._low_rank(h)

    def add_to(self, x: Tensor, h: Tensor) -> Tensor:
        """Return ``x + apply(h)``."""
        return self.base.add_to(x, h) + self._low_rank(h)

    def _low_rank(self, h: Tensor) -> Tensor:
        """Return ``h a.T b.T`` of each policy, ``[N, out]``."""
        if self.counts is None:
            return self._products(h[None])
        most = max(self.counts)
        if min(self.counts) == most:
            return self._products(h.reshape(len(self.counts), most, -1))
        padded = nn.utils.rnn.pad_sequence(h.split(self.counts), batch_first=True)
        sums = self._products(padded).unflatten(0, (len(self.counts), most))
        return torch.cat([rows[:count] for rows, count in zip(sums, self.counts, strict=True)])

    def _products(self, h: Tensor) -> Tensor:
        """Return the products of rows ``[P, N, in]``, ``[P N, out]``, the transpose of a contiguous result."""
        low_rank = torch.bmm(self.a, h.transpose(1, 2))  # [P, rank, N]
        return torch.bmm(self.b, low_rank).transpose(0, 1).flatten(1).t()


def joined(layers: Sequence[Adapted], counts: list[int]) -> Adapted:
    """Return one layer of several policies, from one of each; smaller ranks are filled up with zeros."""
    a = nn.utils.rnn.pad_sequence([layer.a[0] for layer in layers], batch_first=True)
    b = nn.utils.rnn.pad_sequence([layer.b[0].t() for layer in layers], batch_first=True).transpose(1, 2)
    return Adapted(layers[0].base, a, b, counts)


def base_of(model: PreTrainedModel) -> tuple[int, ...] | None:
    """Return the identities of a model's weights below its adapters, equal for models on one base; None without."""
    named = list(model.named_parameters())
    base = tuple(id(parameter) for name, parameter in named if not is_adapter(name))
    return base if len(base) < len(named) else None


class AdaptedWeights:
    """The weights of a Llama-like decoder with adapters, over those of its base; see :class:`DecoderWeights`.

    Args:
        model: model with adapters on the base.
        base: weights below the adapters, shared with other models.
    """

    def __init__(self, model: PreTrainedModel, base: DecoderWeights) -> None:
        self.model, self.base, self.sizes = model, base, base.sizes
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        self.read()

    @torch.no_grad()
    def read(self) -> None:
        """Read the module's current weights."""
        base = self.base
        base.read()
        decoder: Any = self.model.model
        layers: list[LayerWeights[Any]] = base.layers
        self.embedding, self.device, self.norm = base.embedding, base.device, base.norm
        self.inverse_frequency, self.rotary_scale = base.inverse_frequency, base.rotary_scale
        self.architecture, self.copied = base.architecture, base.copied
        self.head = self._with_adapters("head", base.head, self.model.lm_head)
        self.layers = [
            replace(
                base_layer,
                qkv=self._with_adapters(
                    f"{i} qkv",
                    base_layer.qkv,
                    *(getattr(layer.self_attn, f"{projection}_proj") for projection in "qkv"),
                ),
                out=self._with_adapters(f"{i} out", base_layer.out, layer.self_attn.o_proj),
                gate_up=self._with_adapters(f"{i} gate_up", base_layer.gate_up, layer.mlp.gate_proj, layer.mlp.up_proj),
                down=self._with_adapters(f"{i} down", base_layer.down, layer.mlp.down_proj),
            )
            for i, (base_layer, layer) in enumerate(zip(layers, decoder.layers, strict=True))
        ]

    def free(self) -> None:
        """Free all copies of the base until the next :meth:`read`."""
        self.base.free()
        self.layers, self.head, self.copied = [], self.base.head, 0

    def tensors(self) -> list[Tensor]:
        """Return all weights, in one order."""
        return [*self.base.tensors(), *(tensor for pair in self._factors.values() for tensor in pair)]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings ``[N, hidden size]`` of tokens ``[N]``."""
        return self.base.embed(ids)

    def _with_adapters(self, name: str, base: Affine, *modules: Any) -> Affine | Adapted:
        """Return the base's layer with the adapters of its modules, which are stacked along the output."""
        factors = [adapter_factors(module) for module in modules]
        rank = sum(pair[0].shape[0] for pair in factors if pair is not None)
        if not rank:
            return base
        if name not in self._factors:  # their memory stays, for steps that are replayed
            shapes = (rank, base.weight.shape[1]), (base.weight.shape[0], rank)
            like = base.weight
            self._factors[name] = tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes)  # type: ignore[assignment]
        a, b = self._factors[name]
        first = row = 0
        for module, pair in zip(modules, factors, strict=True):
            outputs = getattr(module, "base_layer", module).weight.shape[0]
            if pair is not None:
                last = first + pair[0].shape[0]
                a[first:last].copy_(pair[0])
                b[row : row + outputs, first:last].copy_(pair[1])
                first = last
            row += outputs
        return Adapted(base, a[None], b[None])
