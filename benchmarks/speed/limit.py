"""Compare rollout and update of a GRPO step with the machine's speed at the matrix products that they need.

    python benchmarks/speed/limit.py [--sizes xs s m] [--precisions 32-true] [--steps 8] [--threads 1] \
        [--json benchmarks/results/limit.json]

The work is that of grpo_step.py. The rollout needs the products of every prompt once and of every new token, the update
those of all tokens forward and twice backward, and those of the output head at the new tokens once more, because it is
recomputed. Each product is measured alone in its shape, in the dtype of the precision, as the best of several rounds:
their sum is the least time of a phase, the rest is attention, element-wise operations, sampling, optimizer and Python.
The optimizer and the decode step also read all weights, which bounds their time by the memory's bandwidth. Times of a
phase are the least of all steps after the warm-up, because other processes only add to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from grpo_step import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, SIZES, WARMUP, make_model, run_ours
from lightning import Callback
from provenance import provenance

from mrlm_pl.data.rollout.collection import CollectionObserver

ROWS = PROMPTS * GROUP
ROUNDS, MOST_SECONDS = 20, 1.0
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


@dataclass(frozen=True)
class Product:
    """A product ``[rows, inputs] @ [inputs, outputs]`` and how often a phase needs it."""

    rows: int
    inputs: int
    outputs: int
    times: int

    @property
    def operations(self) -> int:
        """Floating-point operations, two for each multiplication and addition.

        >>> Product(2, 3, 4, times=5).operations
        240
        """
        return 2 * self.rows * self.inputs * self.outputs * self.times


def products(size: str) -> dict[str, list[Product]]:
    """Return the matrix products of a step by phase.

    >>> sum(item.operations for item in products("xs")["rollout"]) == 2 * (
    ...     (2 * 64 * (128 + 64 + 344) + 2 * 172 * 64) * (4 * 64 + 63 * 32) + 64 * 512 * (4 + 63 * 32)
    ... )
    True
    """
    shape = SIZES[size]
    width, inner, layers, vocabulary = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab")
    )
    # as many key heads as value heads, together as many as query heads
    layer = [(width, 2 * width), (width, width), (width, 2 * inner), (inner, width)]

    def decoder(rows: int, times: int) -> list[Product]:
        return [Product(rows, one, other, layers * times) for one, other in layer]

    prompts, new = PROMPTS * PROMPT_TOKENS, ROWS * NEW_TOKENS
    return {
        "rollout": [
            *decoder(prompts, 1),
            Product(PROMPTS, width, vocabulary, 1),
            *decoder(ROWS, NEW_TOKENS - 1),
            Product(ROWS, width, vocabulary, NEW_TOKENS - 1),
        ],
        "update": [*decoder(prompts + new, 3), Product(new, width, vocabulary, 4)],
    }


def best_seconds(run: Callable[[], Any], at_least: float = 2e-3) -> float:
    """Return the least seconds of a call, over rounds of enough calls to be measured, within about a second."""
    run()
    calls, best, end = 1, float("inf"), time.perf_counter() + MOST_SECONDS
    for _ in range(ROUNDS):
        began = time.perf_counter()
        if began > end:
            break
        for _ in range(calls):
            run()
        spent = time.perf_counter() - began
        best = min(best, spent / calls)
        if spent < at_least:
            calls *= 2
    return best


def product_seconds(item: Product, dtype: torch.dtype) -> float:
    """Return the least seconds of one product, with either side first as the faster."""
    left = torch.randn(item.rows, item.inputs).to(dtype)
    weight = torch.randn(item.outputs, item.inputs).to(dtype)
    orders = (lambda: torch.mm(left, weight.t()), lambda: torch.mm(weight, left.t()))
    return min(map(best_seconds, orders))


def bandwidth() -> float:
    """Return the bytes per second that a copy of 256 MB reads and writes."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


class Phases(Callback, CollectionObserver):
    """Seconds of each rollout and of each update."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"rollout": [], "update": []}
        self._last = 0.0

    def _tick(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase].append(now - self._last)
        self._last = now

    def on_collection(self, *_: Any) -> None:
        """Note the end of a rollout."""
        self._tick("rollout")

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the end of an update."""
        self._tick("update")


def measured(size: str, precision: str, steps: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each phase of a step in a precision with its figures."""
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), size)
        run_ours(folder, steps, precision, callbacks=[phases])
    for phase, needed in products(size).items():
        seconds = min(phases.seconds[phase][WARMUP:])
        operations = sum(item.operations for item in needed)
        least = sum(item.times * product_seconds(item, DTYPES[precision]) for item in needed)
        yield (
            phase,
            {
                "seconds": seconds,
                "gflop": operations / 1e9,
                "gflop_per_second": operations / 1e9 / seconds,
                "products_seconds": least,
                "products_gflop_per_second": operations / 1e9 / least,
                "share_of_products": least / seconds,
            },
        )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["xs", "s", "m"])
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES), default=["32-true"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes: dict[str, dict[str, Any]] = {}
    found = {**provenance(), "threads": options.threads, "copy_bytes_per_second": bandwidth(), "sizes": sizes}
    for size in options.sizes:
        for precision in options.precisions:
            sizes.setdefault(size, {})[precision] = dict(measured(size, precision, options.steps))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
