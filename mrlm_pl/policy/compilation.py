"""Compiled decoder layers: fused element-wise operations in the learner's forward and backward pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface

from mrlm_pl.errors import PolicyError
from mrlm_pl.policy.forward.attention import ATTENTION_NAME, packed_attention_forward
from mrlm_pl.policy.sharding import layers

_spent = _started = 0.0
_compiled: WeakSet[nn.Module] = WeakSet()


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of a transformers model, in place, for any number of tokens.

    Layers of one kind share their code (regional compilation), so a deep model takes no longer than a small one. Code
    is made in the first forward and backward passes. Attention over packed rows, whose shapes differ in each pass,
    stays as it is.

    Raises:
        PolicyError: the model does not name its layers.
    """
    model_layers = layers(model)
    if not model_layers:
        raise PolicyError(
            f"{type(model).__name__} does not name its layers, so it cannot be compiled: set compile: false"
        )
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention_forward))
    from torch._dynamo import config  # takes two seconds to import
    from torch._dynamo.callback import callback_handler

    if hasattr(config, "nested_graph_breaks"):  # attention then divides a layer into two graphs instead of four
        config.nested_graph_breaks = True

    if _start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_start)
        callback_handler.register_end_callback(_end)
    for layer in model_layers:
        layer.compile(dynamic=True)
    _compiled.add(model)


def plain_layers(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which the compiled layers of a model run as they were written, as in generation.

    Caches grow with every token, and compiled code would be made for many of their states.
    """
    return torch.compiler.set_stance("force_eager") if model in _compiled else nullcontext()


def compilation_seconds() -> float:
    """Return the seconds that compilations of layers have taken in this process."""
    return _spent


@contextmanager
def counted() -> Iterator[None]:
    """Count the seconds of a compilation that does not start in a call of `compile_layers`' layers."""
    _start(None)
    try:
        yield
    finally:
        _end(None)


def _start(_: object) -> None:
    global _started
    _started = time.perf_counter()


def _end(_: object) -> None:
    global _spent
    _spent += time.perf_counter() - _started
