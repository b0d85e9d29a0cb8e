"""Measure held-out reward of the tiny model on code and tools before and after GRPO, for several seeds.

    python benchmarks/learning/environments_learning.py [--environments code tools] [--seeds 0 1 2] [--json out.json]

For each environment the recipe runs once (demonstrations, then supervised fine-tuning from builtin:tiny, with seed 0),
and GRPO from its policy once per seed. 400 held-out episodes, drawn by that seed, are played before and after; 95 %
intervals respect repeated tasks. CPU seconds are those of all processes, evaluations included.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from seeds import MRLM, ResultsFile, call, parser_of, seconds_of_children

DEMONSTRATIONS = "examples/tiny_model/make_task_demonstrations.py"


def train(config: str, folder: Path, *options: str) -> None:
    """Run ``mrlm train``."""
    call(MRLM, "train", "--config", f"configs/{config}.yaml", "--output", str(folder), *options)


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Return the CPU and wall seconds of the processes that ``work`` starts."""
    used, started = seconds_of_children(), time.perf_counter()
    work()
    wall = time.perf_counter() - started
    return {"cpu_s": round(seconds_of_children() - used, 1), "wall_s": round(wall, 1)}


def recipe(environment: str, folder: Path) -> None:
    """Write demonstrations to a folder, and the run trained on them to its ``recipe``."""
    rows = str(folder / "rows.jsonl")
    call(sys.executable, DEMONSTRATIONS, "--environment", environment, "--output", rows)
    train(f"recipes/tiny_{environment}", folder / "recipe", "--data.train", rows)


def learned(environment: str, policy: Path, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return a row of the table: GRPO from a policy."""
    start = ["--model.policies.main.model", str(policy), "--seed_everything", str(seed)]
    row: dict[str, Any] = {"environment": environment, "seed": seed}
    row |= timed(lambda: train(f"tasks/{environment}", folder, *start, *overrides))
    for moment in ("before", "after"):
        report = json.loads((folder / f"evaluation_{moment}.json").read_text())[environment]
        row[moment] = {
            "reward": round(report["mean_reward"], 3),
            "ci95": [bound if bound is None else round(bound, 3) for bound in report["ci95"]],
            "accuracy": round(report["accuracy"], 3),
            "accuracy_ci95": [round(bound, 3) for bound in report["accuracy_ci95"]],
        }
    return row


def main() -> None:
    """Run every environment with every seed and print a row each."""
    options, overrides = parser_of(__doc__, seeds=3, environments=("code", "tools")).parse_known_args()
    rows: list[dict[str, Any]] = []
    for environment in options.environments:
        folder = Path(tempfile.mkdtemp())
        rows.append({"environment": environment, "recipe": timed(partial(recipe, environment, folder))})
        print(json.dumps(rows[-1]), flush=True)
        for seed in options.seeds:
            rows.append(learned(environment, folder / "recipe/policies/main", seed, folder / f"seed-{seed}", overrides))
            print(json.dumps(rows[-1]), flush=True)
    ResultsFile(options.json).write(rows)


if __name__ == "__main__":
    main()
