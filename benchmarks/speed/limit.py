"""Compare rollout and update of a GRPO step with the machine's speed at the matrix products that they need.

    python benchmarks/speed/limit.py [--sizes xs s m] [--precisions 32-true] [--compile] [--steps 10] [--threads 1] \
        [--json benchmarks/results/limit.json]
    python benchmarks/speed/limit.py --turns 1 2 3 --sizes s [--compile] [--json benchmarks/results/limit_team.json]

The work is that of grpo_step.py, or with ``--turns`` that of team_step.py. The rollout needs the products of every
prompt once and of every new token, the update those of all tokens forward and twice backward, and those of the output
head at the new tokens once more, because it is recomputed. They are measured without anything else, in the dtype of the
precision, in the model's order and with weights for each layer, in the fastest layout and library and as the best of
several rounds: a decode step reads all weights, and most lie outside the nearest cache. Those of a team take each
token of a tree once, while its micro-batches compute common prefixes again. Times of a phase are the least of all steps
after the warm-up, because other processes only add to them.

GRPO's attention is measured alone too, by the library's own functions, in float32: that of a layer of the update with
its backward pass, and that of a decode step of mean length. The last steps run under PyTorch's profiler, which gives
the share of operators and compiled code in their time: products and attention as the step has them, element-wise
operations, copies, sampling and the optimizer. What is left is Python: a step in which it took no time would take the
seconds of the operators. With ``--compile`` the layers of the learner and of the decode step are measured compiled too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from grpo_step import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, WARMUP, run_ours
from lightning import Callback
from provenance import provenance
from random_models import SIZES, make_model, shape_of
from team_step import Work
from team_step import run_ours as run_team
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM

from mrlm_pl.data.rollout.collection import CollectionObserver
from mrlm_pl.engines.local import compiled_layers, engine
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.engines.local.llama_rows import DecoderRows
from mrlm_pl.policy.forward.attention import PackedLayout
from mrlm_pl.policy.forward.packing import Segments
from mrlm_pl.policy.forward.products import linear

ROWS = PROMPTS * GROUP
GROUP_OF_TEAM, NEW_TOKENS_OF_TEAM = 4, 32
ROUNDS, MOST_SECONDS = 20, 1.0
PROFILED = 3
"""Steps under the profiler."""
LAYER = "layer of the decode step"
COMPUTED = ("aten::", "mkldnn::", "## Call CompiledFxGraph", LAYER)
"""Beginnings of the names of operators and compiled code in a profile."""
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


@dataclass(frozen=True)
class Product:
    """A product ``[rows, inputs] @ [inputs, outputs]``, in a number of layers with their own weights."""

    rows: int
    inputs: int
    outputs: int
    layers: int = 1

    @property
    def operations(self) -> int:
        """Floating-point operations, two for each multiplication and addition.

        >>> Product(2, 3, 4, layers=5).operations
        240
        """
        return 2 * self.rows * self.inputs * self.outputs * self.layers


class Passes(NamedTuple):
    """Products that follow one another, and how often a phase needs them."""

    products: list[Product]
    times: int

    @property
    def operations(self) -> int:
        """Floating-point operations of all passes."""
        return self.times * sum(item.operations for item in self.products)


def decoder(size: str, rows: int) -> list[Product]:
    """Return the products of all layers for rows of a token."""
    shape = shape_of(size)
    width, inner, layers = (shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    keys = width * shape["num_key_value_heads"] // shape["num_attention_heads"]  # as wide as the values
    layer = [(width, width + 2 * keys), (width, width), (width, 2 * inner), (inner, width)]
    return [Product(rows, one, other, layers) for one, other in layer]


def head(size: str, rows: int) -> Product:
    """Return the product of the output head for rows of a token."""
    return Product(rows, SIZES[size]["hidden_size"], SIZES[size]["vocab"])


def passes(size: str) -> dict[str, list[Passes]]:
    """Return the matrix products of a step by phase.

    >>> sum(item.operations for item in passes("xs")["rollout"]) == 2 * (
    ...     (2 * 64 * (128 + 64 + 344) + 2 * 172 * 64) * (4 * 64 + 63 * 32) + 64 * 512 * (4 + 63 * 32)
    ... )
    True
    """
    prompts = PROMPTS * PROMPT_TOKENS
    fed = prompts + ROWS * (NEW_TOKENS - 1)  # the last token of a row predicts none
    return {
        "rollout": [
            Passes([*decoder(size, prompts), head(size, PROMPTS)], 1),
            Passes([*decoder(size, ROWS), head(size, ROWS)], NEW_TOKENS - 1),
        ],
        "update": [Passes(decoder(size, fed), 3), Passes([head(size, ROWS * NEW_TOKENS)], 4)],
    }


def team_passes(size: str, work: Work) -> dict[str, list[Passes]]:
    """Return the matrix products of a team's step by phase; each token of the tree is computed once.

    >>> work = Work(2, 1, "magrpo", 4, 32, "", 0.0, 0)
    >>> [[(item.products[0].rows, item.times) for item in needed] for needed in team_passes("s", work).values()]
    [[(64, 2), (4, 62), (8, 2), (16, 62)], [(692, 6), (640, 8)]]
    """
    states, agents, drawn = [work.group**turn for turn in range(work.turns)], work.agents, work.new_tokens
    rollout, fed = [], PROMPT_TOKENS
    for turn, count in enumerate(states):
        # of a later turn, the last token of the reply and one more word
        new = 2 * count if turn else PROMPT_TOKENS
        rollout.append(Passes([*decoder(size, new), head(size, count)], agents))
        rows = count * work.group
        rollout.append(Passes([*decoder(size, rows), head(size, rows)], agents * (drawn - 1)))
        # a reply and one more word, or in the last turn all but the last token, which predicts none
        fed += rows * (drawn + 1 if turn + 1 < work.turns else drawn - 1)
    replies = Passes([head(size, sum(states) * work.group * drawn)], 4 * agents)
    return {"rollout": rollout, "update": [Passes(decoder(size, fed), 3 * agents), replies]}


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


def pass_seconds(products: Sequence[Product], dtype: torch.dtype) -> float:
    """Return the least seconds of one pass through the products, each in the fastest of four ways."""
    chains: list[list[Callable[[], Any]]] = []
    for item in products:
        left = torch.randn(item.rows, item.inputs).to(dtype)
        weights = [torch.randn(item.outputs, item.inputs).to(dtype) for _ in range(item.layers)]
        ways: list[list[Callable[[], Any]]] = [
            [partial(torch.mm, left, weight.t()) for weight in weights],
            [partial(torch.mm, weight, left.t()) for weight in weights],
            [partial(torch.mm, left, weight.t().contiguous()) for weight in weights],
            [partial(linear, left, weight) for weight in weights],
        ]
        chains.append(min(ways, key=lambda chain: best_seconds(chain[0])))
    in_order = [chain[layer] for layer in range(max(map(len, chains))) for chain in chains if layer < len(chain)]

    def run() -> None:
        for product in in_order:
            product()

    return best_seconds(run)


def attention_seconds(folder: str, size: str) -> dict[str, float]:
    """Return the least seconds of all layers' attention in each phase, for the model of a folder."""
    shape = shape_of(size)
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layers, width = shape["num_hidden_layers"], shape["hidden_size"] // heads
    # the last token of a row predicts none, so it is not fed
    lengths = (PROMPT_TOKENS,) * PROMPTS, (NEW_TOKENS - 1,) * ROWS
    ancestors = ((),) * PROMPTS, tuple((row // GROUP,) for row in range(ROWS))
    layout = PackedLayout(Segments(lengths, ancestors), torch.device("cpu"))
    tokens = sum(map(sum, lengths))
    shapes = [(tokens, number, width) for number in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    gradient = torch.randn(shapes[0])
    update = best_seconds(lambda: torch.autograd.grad(layout.attend(q, k, v, None), (q, k, v), gradient))

    decoder = FusedDecoder(AutoModelForCausalLM.from_pretrained(folder), torch.float32)
    of_step = [torch.randn(ROWS, number, width) for number in (heads, kv_heads, kv_heads)]
    with torch.inference_mode():
        rows = DecoderRows(decoder, [PROMPT_TOKENS] * PROMPTS, [GROUP] * PROMPTS, NEW_TOKENS)
        for _ in range(NEW_TOKENS // 2):
            rows.step(torch.zeros(ROWS, dtype=torch.long))
        step = best_seconds(lambda: rows.attend(0, *of_step))
    return {"rollout": layers * (NEW_TOKENS - 1) * step, "update": layers * update}


def bandwidth() -> float:
    """Return the bytes per second that a copy of 256 MB reads and writes."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


@contextmanager
def named_layers() -> Iterator[None]:
    """Show the compiled layers of the decode step to the profiler, which does not know them, within the context."""
    original = compiled_layers.compiled_layers

    def named(decoder: Any) -> list[compiled_layers.Code]:
        def shown(code: compiled_layers.Code, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
            with record_function(LAYER):
                return code(arguments)

        return [partial(shown, code) for code in original(decoder)]

    with patch.object(engine, "compiled_layers", named):
        yield


def computed(profiler: profile) -> tuple[int, float]:
    """Return the number of operators and pieces of compiled code in a profile, and the seconds inside them."""
    found = [item for item in profiler.key_averages() if item.key.startswith(COMPUTED)]
    return sum(item.count for item in found), sum(item.self_cpu_time_total for item in found) / 1e6


class Phases(Callback, CollectionObserver):
    """Seconds of each rollout and of each update; of some the number of operators, and their share of the time.

    Args:
        steps: number of steps; the last ones run under the profiler and are not measured.
    """

    def __init__(self, steps: int) -> None:
        self.seconds: dict[str, list[float]] = {"rollout": [], "update": []}
        self.operators: dict[str, list[tuple[int, float]]] = {"rollout": [], "update": []}
        self._plain, self._last = steps - PROFILED, 0.0
        self._profiler: profile | None = None

    def _tick(self, phase: str) -> None:
        now = time.perf_counter()
        if self._profiler is None:
            self.seconds[phase].append(now - self._last)
        else:
            self._profiler.stop()
            count, inside = computed(self._profiler)
            self.operators[phase].append((count, inside / (now - self._last)))
        if len(self.seconds["update"]) == self._plain and len(self.operators["update"]) < PROFILED:
            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.start()
        self._last = time.perf_counter()

    def on_collection(self, *_: Any) -> None:
        """Note the end of a rollout."""
        self._tick("rollout")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the end of an update."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._tick("update")


def measured(
    size: str, precision: str, steps: int, compiled: bool, turns: int | None
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each phase of a step with its figures; ``turns`` are those of a team, None of GRPO."""
    phases = Phases(steps)
    with tempfile.TemporaryDirectory() as folder, named_layers():
        make_model(Path(folder), size)
        if turns is None:
            of_phases, attended = passes(size), attention_seconds(folder, size)
            run_ours(folder, steps, precision, callbacks=[phases], compiled=compiled)
        else:
            work = Work(turns, steps, "magrpo", GROUP_OF_TEAM, NEW_TOKENS_OF_TEAM, "", 1e-5, seed=0)
            of_phases, attended = team_passes(size, work), {}
            run_team(folder, work, callbacks=[phases], compiled=compiled, precision=precision)
    for phase, needed in of_phases.items():
        seconds = min(phases.seconds[phase][WARMUP:])
        operations = sum(item.operations for item in needed)
        count, share = sorted(phases.operators[phase], key=lambda found: found[1])[PROFILED // 2]
        least = sum(item.times * pass_seconds(item.products, DTYPES[precision]) for item in needed)
        yield (
            phase,
            {
                "seconds": seconds,
                "gflop": operations / 1e9,
                "gflop_per_second": operations / 1e9 / seconds,
                "products_seconds": least,
                "products_gflop_per_second": operations / 1e9 / least,
                "share_of_products": least / seconds,
                **({"attention_seconds": attended[phase]} if attended else {}),
                "operators": count,
                "operators_seconds": share * seconds,
            },
        )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["xs", "s", "m"])
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES), default=["32-true"])
    parser.add_argument("--compile", action="store_true", help="measure compiled layers too")
    parser.add_argument("--turns", nargs="+", type=int, help="of a team's step, which is measured instead of GRPO's")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps < (least := WARMUP + 1 + PROFILED):
        parser.error(f"--steps is {options.steps}; at least {least} are needed: warm-up, a measured and profiled steps")
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    found = {**provenance(), "threads": options.threads, "copy_bytes_per_second": bandwidth(), "rows": rows}
    kinds = [False, True] if options.compile else [False]
    work = itertools.product(options.sizes, options.precisions, options.turns or [None], kinds)
    for size, precision, turns, compiled in work:
        phases = dict(measured(size, precision, options.steps, compiled, turns))
        row = {"size": size, "precision": precision, "compiled": compiled}
        rows.append(row | ({"turns": turns} if turns else {}) | {"phases": phases})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
