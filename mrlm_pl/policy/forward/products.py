"""Matrix products in float32 by oneDNN, on processors where MKL, which PyTorch takes for them, is slower."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

LEAST = 2**21
"""Multiplications from which the call of oneDNN takes less time than it saves."""

ROWS = 64
"""Rows for which code compiled for any number of them chooses."""

PACKED = 2**16
"""Numbers of a weight from which a product with its packed copy is the fastest for any number of rows."""

PART = 2**22
"""Most numbers of a product on its way to another tensor."""


def onednn_is_faster(processor: str) -> bool:
    """Return whether oneDNN computes products in float32 with AVX-512 here and MKL without.

    MKL uses its AVX-512 code only on Intel's processors; on AMD's fifth generation oneDNN takes 0.45 to 0.5 of MKL's
    time (torch 2.13). The choice depends on the processor alone, so runs on it stay bit for bit equal.

    Args:
        processor: description of the processor, with the vendor.
    """
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return libraries and "AuthenticAMD" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _processor() -> str:
    """Return the description of this machine's first processor by Linux, else by Python."""
    try:
        with Path("/proc/cpuinfo").open() as described:
            return described.read(1024)  # the whole file takes long with hundreds of processors
    except OSError:
        return platform.processor()


ONEDNN_IS_FASTER = onednn_is_faster(_processor())
"""True where :func:`linear` takes oneDNN."""


_stood_for: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Weights by the numbers that stand for them in compiled code."""


class FastLinear(nn.Linear):
    """A linear layer whose products are :func:`linear`'s."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``y``, [..., outputs], for ``input``, [..., inputs]."""
        return linear(input, self.weight, self.bias)


LINEAR = (nn.Linear, FastLinear)
"""Plain linear layers."""

ModelT = TypeVar("ModelT", bound=nn.Module)


def body_layers(model: nn.Module, chosen: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Return the layers that are chosen, with their names, but the output head.

    The head has its own products; see :mod:`mrlm_pl.policy.forward.head`.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [(name, layer) for name, layer in model.named_modules() if layer is not head and chosen(layer)]


def with_fast_products(model: ModelT) -> ModelT:
    """Return the model, its linear layers but the output head as :class:`FastLinear`."""
    for _, layer in body_layers(model, lambda layer: type(layer) is nn.Linear):
        layer.__class__ = FastLinear
    return model


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, [..., outputs], as ``torch.nn.functional.linear``, by the faster library.

    >>> linear(torch.ones(1, 2), torch.ones(3, 2), torch.ones(3))
    tensor([[3., 3., 3.]])
    """
    if weight.is_mkldnn:
        return _product(x, weight, bias)
    if weight.dtype == torch.int64:
        return _in_compiled_code(x, weight, bias)
    return _differentiable_product(x, weight, bias) if _by_onednn(x, weight) else F.linear(x, weight, bias)


def packed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return a copy of parts of a weight, stacked along the outputs, for products by :func:`linear` without a gradient.

    It has the layout of oneDNN's kernels, which read other layouts more slowly, above all with few rows and with a
    power of two as the number of outputs: a product takes 0.4 to 0.65 of the time with 4 rows and widths of 512 to
    2752, and 0.8 to 0.95 with 32 rows (AMD's fifth generation, torch 2.13). PyTorch hides the memory of such a tensor.

    Returns:
        Return None if it would not be faster.
    """
    fast = ONEDNN_IS_FASTER and dtype in (torch.float32, torch.bfloat16) and parts[0].device.type == "cpu"
    if not fast or sum(part.numel() for part in parts) < PACKED:
        return None
    stacked = torch.cat([part.to(dtype) for part in parts]) if len(parts) > 1 else parts[0].to(dtype)
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(stacked, None)
    return copy


def standing_for(weight: Tensor) -> Tensor:
    """Return numbers ``[outputs]`` that stand for a packed weight in :func:`linear`, as long as it exists.

    Compiled code cannot be given a packed weight.
    """
    _stood_for[id(weight)] = weight
    return torch.full(weight.shape[:1], id(weight))


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write ``left @ right`` to ``out``, [N, M], or add it, without a gradient."""
    if not _by_onednn(left, right.t()):
        out.addmm_(left, right, beta=int(add))
        return
    by_columns = out.shape[0] < out.shape[1]
    size = max(1, PART // min(out.shape))
    operand = right.t() if by_columns else left
    for target, part in zip(out.split(size, int(by_columns)), operand.split(size), strict=True):
        product = _product(left, part) if by_columns else _product(part, right.t())
        target.add_(product) if add else target.copy_(product)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        ONEDNN_IS_FASTER
        # compiled code is for any number of rows
        and (ROWS * weight.numel() if _is_traced(x) else x.numel() * weight.shape[0]) >= LEAST
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and x.dim() > 1
        and x.shape[-1:] == weight.shape[1:]  # of others PyTorch names the shapes
        and not isinstance(weight, DTensor)
    )


def _is_traced(x: Tensor) -> bool:
    """Return whether the call becomes code; while one thread compiles, ``is_compiling`` is true in all of them."""
    compiler = torch.compiler
    return compiler.is_compiling() and (compiler.is_dynamo_compiling() or type(x) not in (Tensor, nn.Parameter))


def _differentiable_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    # Of more dimensions the function would return a view, which models could not change in place.
    return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _is_traced(x):
        return _in_compiled_code(x, weight, bias)
    bias = None if bias is None else bias.contiguous()  # the operator ignores its strides
    if not (weight.is_mkldnn or weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # it reads a weight with gaps a hundred times slower
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


def _in_compiled_code(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mrlm.product(x, weight, bias)
    return product


# torch.library.custom_op, which would allow for gradients too, takes 20 microseconds longer for each call.
_library = torch.library.Library("mrlm", "FRAGMENT")  # a reload of the module replaces it
_library.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl(_library, "product", "CPU")
def _from_compiled_code(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `_product` in the form that TorchInductor takes, whose own operator needs weights that never change."""
    return _product(x, _stood_for[int(weight[0])] if weight.dtype == torch.int64 else weight, bias)


# torch.library.register_fake looks for its caller among the files of all modules, for 30 ms.
@torch.library.impl(_library, "product", "Meta")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """The function behind `linear`, for inputs of two dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else _differentiable_product(slope, weight.t())
        grad_weight = None if x is None else _weight_gradient(slope, x)
        return grad_x, grad_weight, slope.sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(slope: Tensor, x: Tensor) -> Tensor:
    """Return ``slope.t() @ x``; the operator copies the left factor's transpose, so that is the smaller one."""
    if slope.shape[1] > x.shape[1]:
        return _differentiable_product(x.t(), slope.t()).t()
    return _differentiable_product(slope.t(), x.t())
