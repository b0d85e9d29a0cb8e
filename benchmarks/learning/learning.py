"""Measure held-out accuracy before and after every algorithm of one policy, for several seeds, in one table.

    python -m benchmarks.learning.learning [--configs quickstart algorithms/ppo ...] [--seeds 0 1 2 3 4] [--json FILE]

Every configuration starts from builtin:tiny on the generated problems of difficulty 1 and is evaluated on the same 500
held-out problems before and after. SFT and the preference algorithms train on 6,000 episodes of the policy from `mrlm
collect`: SFT on the right ones, the others on 8 of each problem, KTO on each by its success. ``rewards`` are the mean
rewards of the rollouts, one per iteration; CPU seconds are those of all processes, collection and evaluations included.
Runs that ``--json`` holds already are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

WITHOUT_KL = "--model.kl.coefficient 0"
CONFIGS = (
    "quickstart",
    "algorithms/dapo",
    *(
        f"quickstart --model {name} {WITHOUT_KL}"
        for name in ("GSPO", "CISPO", "RLOO", "REINFORCE", "REINFORCEPlusPlusBaseline", "ReMax")
    ),
    "quickstart --model REINFORCEPlusPlus",
    "algorithms/ppo",
    "algorithms/sft",
    *(f"algorithms/preferences/{name}" for name in ("dpo", "simpo", "orpo", "kto")),
)
"""Configurations below ``configs/``, without ``.yaml``, each with its options."""

MATH = ["--environment", "math", "--environment.difficulty", "[1, 1]", "--max-tokens", "32"]
EPISODES = 6000


def call(*arguments: str) -> None:
    """Run an ``mrlm`` command."""
    command = [str(Path(sys.executable).with_name("mrlm")), *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")


def from_rollouts(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the accuracies before and after an online algorithm, whose callback evaluates, and its rewards."""
    options = ["--seed_everything", str(seed), "--trainer.default_root_dir", str(folder / "run"), *overrides]
    path, *own = config.split()
    call("fit", "--config", f"configs/{path}.yaml", *own, *options)
    with (folder / "run/metrics.csv").open() as file:
        rewards = [round(float(row["rollout/reward"]), 3) for row in csv.DictReader(file) if row["rollout/reward"]]
    files = {moment: folder / f"run/evaluation_{moment}.json" for moment in ("before", "after")}
    accuracies = {moment: json.loads(file.read_text())["math"]["accuracy"] for moment, file in files.items()}
    return accuracies | {"rewards": rewards}


def from_episodes(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the accuracies before and after training on the policy's own episodes."""
    kept = ["--filter-reward", "1"] if config == "algorithms/sft" else ["--samples-per-task", "8"]
    episodes = str(folder / "episodes.jsonl")
    collected = ["--num-episodes", str(EPISODES), "--seed", str(seed), "--output", episodes, *kept]
    call("collect", "--model", "builtin:tiny", *MATH, *collected)
    options = ["--data.train", episodes, "--seed_everything", str(seed), *overrides]
    call("fit", "--config", f"configs/{config}.yaml", "--trainer.default_root_dir", str(folder / "run"), *options)
    accuracies = {}
    for moment, model in (("before", "builtin:tiny"), ("after", str(folder / "run"))):
        output = folder / f"{moment}.json"
        call("eval", "--model", model, *MATH, "--num-episodes", "500", "--seed", str(seed), "--output", str(output))
        accuracies[moment] = json.loads(output.read_text())["accuracy"]
    return accuracies


def run(config: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Return one row of the table."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    learn = from_episodes if config.startswith(("algorithms/sft", "algorithms/preferences")) else from_rollouts
    with tempfile.TemporaryDirectory() as folder:
        found = learn(config, seed, Path(folder), overrides)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {"config": config, "seed": seed, "cpu_s": round(seconds, 1), **found}


def main() -> None:
    """Run every configuration with every seed and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--configs", nargs="+", default=list(CONFIGS), help="paths below configs/, without .yaml, with options"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    done = {(row["config"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for config in options.configs:
            if (config, seed) not in done:
                rows.append(run(config, seed, overrides))
                print(json.dumps(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
