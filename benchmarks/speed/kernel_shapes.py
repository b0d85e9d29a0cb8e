"""Count the shapes of matrix products in the steps of a bf16 run on a CPU, with and without buckets.

    python benchmarks/speed/kernel_shapes.py [--steps 10] [--json benchmarks/results/kernel_shapes.json]

oneDNN makes a kernel for every new shape. GRPO trains ``builtin:tiny`` on the problems of the quick start, 8 groups of
8 replies, in ``bf16-mixed``; the CPU is taken for one without and for one with instructions for bf16, which switches
the buckets of :mod:`mrlm_pl.policy.forward.devices`. Counted are distinct products (operation and shapes) of each
step, and those that no earlier step had. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, seed_everything
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from mrlm_environments import MathEnvironment
from provenance import provenance
from quiet_trainer import quiet_trainer

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.policy import Policy

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}
PHASES = ("sampler", "learner")


class Shapes(TorchDispatchMode):
    """Notes the distinct products of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in PRODUCTS:
            self.seen.add((name, *(tuple(item.shape) for item in args if isinstance(item, torch.Tensor))))
        return func(*args, **(kwargs or {}))


class Engine(InProcessEngine):
    """The default engine, which notes its products."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.bfloat16)
        self.shapes = Shapes()

    def _sample(self, *work: Any) -> Any:
        with self.shapes:
            return super()._sample(*work)


class Steps(Callback):
    """Keeps the products of each step.

    Args:
        phases: shapes of the sampler and of the learner.
    """

    def __init__(self, *phases: Shapes) -> None:
        self.phases, self.steps = phases, list[list[set[Any]]]()

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep the products since the last step."""
        sampler, both = (phase.seen for phase in self.phases)  # they may share a thread
        self.steps.append([sampler, both - sampler])
        for phase in self.phases:
            phase.seen = set()


def run(buckets: bool, steps: int) -> dict[str, Any]:
    """Return, for each phase, the distinct products of each step, the new ones, and those of all steps."""
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: buckets  # type: ignore[attr-defined] # made at run time
    seed_everything(0, verbose=False)
    engine, learner = Engine(), Shapes()
    counted = Steps(engine.shapes, learner)
    trainer = quiet_trainer(
        max_steps=steps, precision="bf16-mixed", default_root_dir=tempfile.mkdtemp(), callbacks=[counted]
    )
    environment = MathEnvironment(difficulty=(1, 1))
    data = RolloutDataModule(
        environment, engine=engine, groups=8, group_size=8, iterations=steps, sampling=Sampling(max_tokens=32)
    )
    with learner:
        trainer.fit(GRPO({"main": Policy(learning_rate=5e-4)}), data)
    return {phase: _counts([step[place] for step in counted.steps]) for place, phase in enumerate(PHASES)}


def _counts(steps: Sequence[set[Any]]) -> dict[str, Any]:
    known: set[Any] = set()
    new = []
    for step in steps:
        new.append(len(step - known))
        known |= step
    return {"distinct": [len(step) for step in steps], "new": new, "all": len(known)}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {name: run(buckets, options.steps) for name, buckets in (("exact", False), ("buckets", True))}
    text = json.dumps({**provenance(), "steps": options.steps, **found}, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
