"""Activations that the backward pass computes again instead of keeping them from the forward pass.

The factors of a product are kept for its own gradient, so the product itself need not be: of a gated MLP two
activations remain of four, of an RMSNorm its input alone. The values are the same, bit for bit, and the work is that
of a few element-wise operations.
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
"""Fewest bytes of an activation that is computed again: the work for smaller ones is that of starting it."""

# By the name of the operation's node in the autograd graph, which keeps the arguments.
_OPERATIONS: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}
_MOST_OPERATIONS = 2
"""Most operations, one after the other, that compute an activation again."""


def rematerialized() -> AbstractContextManager[object]:
    """Return a context whose forward pass keeps no large activation that follows from others by cheap operations.

    The gradients are the same, bit for bit, and may be computed after the context.
    """
    return torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked)


class _Result:
    """The result of a node of the autograd graph, computed again when it is first needed.

    Args:
        node: of one of the operations.
        arguments: those of its arguments that are computed again themselves.
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
            states = _OPERATIONS[self._node.name()](self._node).contiguous()
        self._used += 1
        self._states = states if self._used % self.uses else None
        return states


def _packed(states: Tensor) -> Tensor | Callable[[], Tensor]:
    """Return how to compute an activation again, or the activation itself."""
    base = states._base if states._is_view() else states
    if base is None or base.nbytes < LEAST_BYTES or base.numel() != states.numel() or not base.is_contiguous():
        return states
    result = None if base.grad_fn is None else _result(base.grad_fn)
    if result is None:
        return states
    result.uses += 1
    shape, stride, offset = states.shape, states.stride(), states.storage_offset()
    return lambda: result.states().as_strided(shape, stride, offset)


def _result(node: Any) -> _Result | None:
    """Return the result of a node, if few operations compute it from the kept tensors; None for others."""
    found = _known(node)
    if found is not None or node.name() not in _OPERATIONS:
        return found
    before = [argument for argument, _ in node.next_functions]
    if None in before:  # a product keeps an argument only for the gradient of the other
        return None
    arguments = [argument for argument in map(_known, before) if argument is not None]
    if any(argument.operations == _MOST_OPERATIONS for argument in arguments):
        return None
    found = _Result(node, arguments)
    # weakly: the result holds its node, and nothing would ever free a circle through the graph
    node.metadata[__name__] = weakref.ref(found)
    return found


def _known(node: Any) -> _Result | None:
    reference = node.metadata.get(__name__)
    return reference and reference()


@torch.no_grad()
def _unpacked(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()
