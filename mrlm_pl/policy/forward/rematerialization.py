"""Activations that the backward pass recomputes instead of keeping them from the forward pass.

The factors of a product are kept for its own gradient, so the product itself need not be: two of the four activations
of a gated MLP and one of the three of an RMSNorm are not kept. Recomputed values are the same, bit for bit, and the
work is that of a few element-wise operations. A product with a weight is kept, since sharding may free the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_BYTES = 2**20
"""Fewest bytes of a recomputed activation; below, the cost of launching the operations dominates."""

# By the name of the operation's node in the autograd graph, which keeps the arguments.
_OPERATIONS: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}
_MOST_OPERATIONS = 2
_WEIGHT = "torch::autograd::AccumulateGrad"
"""Longest chain of operations that recomputes an activation."""


def rematerialized() -> AbstractContextManager[object]:
    """Return a context whose forward pass keeps no large activation that cheap operations recompute from others.

    The gradients are the same, bit for bit, and may be computed after the context. A change of a kept activation in
    place raises RuntimeError in the backward pass, as without the context.
    """
    return torch.autograd.graph.saved_tensors_hooks(_pack, lambda unpack: unpack())


class _Result:
    """The result of a node of the autograd graph, recomputed when it is first needed.

    Args:
        node: node of one of the operations.
        arguments: arguments of the node that are recomputed themselves.
    """

    def __init__(self, node: Any, arguments: list[_Result]) -> None:
        self.operations: int = 1 + max((argument.operations for argument in arguments), default=0)
        self.uses = self._used = 0
        self._node = node
        self._states: Tensor | None = None
        for argument in arguments:
            argument.uses += 1

    def states(self) -> Tensor:
        """Return the activation, and forget it at its last use."""
        states = self._states
        if states is None:
            states = _OPERATIONS[self._node.name()](self._node)
        self._used += 1
        self._states = states if self._used % self.uses else None
        return states


def _pack(states: Tensor) -> Callable[[], Tensor]:
    """Return a function that recomputes an activation or, where that is not cheap, returns the kept one."""
    base = states._base if states._is_view() else states
    result = None
    if base is not None and base.nbytes >= LEAST_BYTES:
        # changed in place it would not be the result of its operation
        result = _result(base.grad_fn) if base.grad_fn is not None and base._version == 0 else None
    if result is None:
        return _Kept(states)
    result.uses += 1
    shape, stride, offset = states.shape, states.stride(), states.storage_offset()
    return lambda: result.states().as_strided(shape, stride, offset)


class _Kept:
    """A kept activation, without its graph: a node that keeps its own result would never be freed."""

    def __init__(self, states: Tensor) -> None:
        self._states, self._version = states.detach(), states._version

    def __call__(self) -> Tensor:
        """Return the activation.

        Raises:
            RuntimeError: it has changed. PyTorch does not check what passes through hooks.
        """
        if self._states._version != self._version:
            raise RuntimeError(
                f"an activation [{', '.join(map(str, self._states.shape))}] needed for gradient computation has been "
                "modified by an inplace operation"
            )
        return self._states


def _result(node: Any) -> _Result | None:
    """Return the result of a node, if few operations recompute it from kept activations; None for others."""
    result = _stored_result(node)
    if result is not None:
        return result
    before = [argument for argument, _ in node.next_functions]
    # A product keeps an argument only for the gradient of the other. A weight may be gathered for its layer alone.
    if node.name() not in _OPERATIONS or None in before or _WEIGHT in [argument.name() for argument in before]:
        return None
    arguments = [argument for argument in map(_stored_result, before) if argument is not None]
    if any(argument.operations == _MOST_OPERATIONS for argument in arguments):
        return None
    result = _Result(node, arguments)
    # weakly: the result holds its node, and a reference cycle through the graph is never freed
    node.metadata[__name__] = weakref.ref(result)
    return result


def _stored_result(node: Any) -> _Result | None:
    reference = node.metadata.get(__name__)
    return None if reference is None else reference()
