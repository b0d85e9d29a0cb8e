"""Weights of frozen models in int8: a quarter of the memory of their linear layers, rounded."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from mrlm_pl.errors import PolicyError
from mrlm_pl.policy.forward.products import LINEAR, body_layers, linear


class Int8Linear(nn.Module):
    """A frozen linear layer ``y = s (Q x) + b`` with weights Q in int8 and a scale for each output.

    ``s_i = max_j |W_ij| / 127`` and ``Q_ij = round(W_ij / s_i)``: symmetric quantization per output channel, as
    LLM.int8() has it for weights (arXiv 2208.07339). Inputs are not quantized. The product is computed in
    the dtype of the input, or of autocast.

    Args:
        linear: layer to quantize; it does not change.

    Attributes:
        rounded: [outputs, inputs] int8, the weights Q.
        scale: [outputs], the scales s, in the dtype of the layer.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1) / 127
        rounded = (weight / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).round_()
        # Parameters, since strategies broadcast buffers in every forward pass.
        self.rounded = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``y``, [..., outputs], for ``x``, [..., inputs]."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = linear(x.to(dtype), self.rounded.to(dtype)).mul_(self.scale)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def weight(self) -> Tensor:
        """The rounded weight ``s Q``, [outputs, inputs], in the dtype of the scale: some models read it themselves."""
        return self.rounded.to(self.scale.dtype) * self.scale[:, None]


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers without heads: the output head, and any with a single output.

    The learner reads the weights of the output head.
    """
    return [name for name, _ in body_layers(model, lambda layer: type(layer) in LINEAR and layer.out_features > 1)]


def int8_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers in int8."""
    return [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]


def to_int8(model: nn.Module, names: Collection[str]) -> None:
    """Replace linear layers of a model by :class:`Int8Linear`, in place.

    Args:
        model: frozen model.
        names: names of the layers.

    Raises:
        PolicyError: there are no such layers.
    """
    if not names:
        raise PolicyError(f"int8: {type(model).__name__} has no linear layers to quantize; leave `int8` out")
    for name in names:
        model.set_submodule(name, Int8Linear(model.get_submodule(name)))  # type: ignore[arg-type]
