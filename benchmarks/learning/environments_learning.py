"""Measure held-out reward of the tiny model on code and tools before and after GRPO, for several seeds.

    python benchmarks/learning/environments_learning.py [--environments code tools] [--seeds 0 1 2] [--json out.json]

For each environment the recipe runs once (demonstrations, then supervised fine-tuning from builtin:tiny, with seed 0),
and GRPO from its policy once per seed. 400 held-out episodes, drawn by that seed, are played before and after; 95 %
intervals respect repeated tasks. CPU seconds are those of all processes, evaluations included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

DEMONSTRATIONS = "examples/tiny_model/make_task_demonstrations.py"


def call(command: list[str]) -> None:
    """Run a command, and print its output if it fails."""
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")


def train(config: str, folder: Path, *options: str) -> None:
    """Run ``mrlm train``."""
    mrlm = str(Path(sys.executable).with_name("mrlm"))
    call([mrlm, "train", "--config", f"configs/{config}.yaml", "--output", str(folder), *options])


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Return the CPU and wall seconds of the processes that ``work`` starts."""
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {"cpu_s": round(cpu, 1), "wall_s": round(wall, 1)}


def recipe(environment: str, folder: Path) -> None:
    """Write demonstrations to a folder, and the run trained on them to its ``recipe``."""
    rows = str(folder / "rows.jsonl")
    call([sys.executable, DEMONSTRATIONS, "--environment", environment, "--output", rows])
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", nargs="+", choices=("code", "tools"), default=["code", "tools"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    for environment in options.environments:
        folder = Path(tempfile.mkdtemp())
        rows.append({"environment": environment, "recipe": timed(partial(recipe, environment, folder))})
        print(json.dumps(rows[-1]), flush=True)
        for seed in options.seeds:
            rows.append(learned(environment, folder / "recipe/policies/main", seed, folder / f"seed-{seed}", overrides))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
