"""The precision of a run that ``precision: auto`` chooses by measuring this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FULL, MIXED = "32-true", "bf16-mixed"
GAIN = 0.8
"""Maximum fraction of the time of :data:`FULL` that :data:`MIXED` may take, so that noise does not decide."""

_TOKENS, _ROWS = 512, 32
_LARGEST = 2**28
"""Maximum number of learner tokens, sampler rows, and multiplications of a product, on a CPU."""

_TOKENS_ACCELERATOR, _ROWS_ACCELERATOR = 4096, 256
_BUDGET_SECONDS = 0.4


def product_seconds(inputs: int, outputs: int, device: torch.device) -> dict[str, float]:
    """Return the seconds of a model's matrix products by precision, the best of several rounds in under a second.

    The time is that of a product of the learner, with the casts of autocast, and of products of the sampler over as
    many tokens, which holds its weights in its own dtype.

    Args:
        inputs: number of inputs of the model's widest linear layer.
        outputs: number of outputs of that layer.
        device: device of the run.
    """
    tokens, rows = _TOKENS_ACCELERATOR, _ROWS_ACCELERATOR  # fewer take as long in any precision
    if device.type == "cpu":
        tokens, rows = min(_TOKENS, max(_ROWS, _LARGEST // (inputs * outputs) // _ROWS * _ROWS)), _ROWS
    x, w = torch.randn(tokens, inputs, device=device), torch.randn(outputs, inputs, device=device)
    work = {precision: _products(x, w, dtype, rows) for precision, dtype in ((FULL, x.dtype), (MIXED, torch.bfloat16))}
    for products in work.values():
        _seconds(products, device)  # makes the kernels
    best = dict.fromkeys(work, float("inf"))
    end = time.perf_counter() + _BUDGET_SECONDS
    while True:
        for precision, products in work.items():
            best[precision] = min(best[precision], _seconds(products, device))
        if time.perf_counter() > end:
            return best


def faster(seconds: dict[str, float]) -> str:
    """Return the precision to train in, given :func:`product_seconds`.

    >>> faster({"32-true": 0.010, "bf16-mixed": 0.007}), faster({"32-true": 0.010, "bf16-mixed": 0.009})
    ('bf16-mixed', '32-true')
    """
    return MIXED if seconds[MIXED] < GAIN * seconds[FULL] else FULL


def set_precision(trainer: Any, precision: str) -> None:
    """Give a Lightning trainer that has not begun the plugin of another precision."""
    connector = trainer._accelerator_connector
    connector._precision_flag = precision
    connector.precision_plugin = connector._check_and_init_precision()
    trainer.strategy.precision_plugin = connector.precision_plugin


def _products(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, rows: int) -> Callable[[], None]:
    cast_weights, chunks = w.to(dtype), x.to(dtype).split(rows)

    def compute() -> None:
        _ = x.to(dtype) @ w.to(dtype).t()
        for chunk in chunks:
            _ = chunk @ cast_weights.t()

    return compute


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
