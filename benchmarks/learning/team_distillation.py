"""Distill a team of two specialists into one tiny model: the student against the team and its majority.

    python benchmarks/learning/team_distillation.py [--seeds 0 1 2 3 4] [--iterations 40] [--json out.json]

The team are the specialists of ``examples/specialists.py``, co-trained once with
configs/algorithms/teams/co_training.yaml. With each seed, configs/algorithms/distillation/team.yaml distils it
into the built-in tiny model, which answers alone, in one turn, and sees no reward. All accuracies are on the same
held-out questions: ``student`` before and after, ``team`` the mean of the solvers in the last turn, ``majority`` their
vote. Intervals are 95 % over the seeds (Student's t), for the differences to the student paired by seed. ``--json``
keeps the seeds that its file has, and is written after each seed: the same command continues a run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from co_training import ALONE
from seeds import MRLM, ResultsFile, call, parser_of
from teams import over_seeds


def command_of(config: str, models: Path, seed: int, turns: int, folder: Path, *options: str) -> list[str]:
    """Return ``mrlm train`` with a configuration and the questions of the models' folder."""
    data = {split: str(models / f"{split}.jsonl") for split in ("train", "validation", "test")}
    command = [MRLM, "train", "--config", f"configs/algorithms/{config}.yaml", "--output", str(folder)]
    command += ["--seed_everything", str(seed), "--data.environment.data", json.dumps(data)]
    return [*command, "--data.environment.max_turns", str(turns), "--trainer.limit_val_batches", "0", *options]


def run(models: Path, team: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the accuracies of one student, its team and the majority."""
    folder = Path(tempfile.mkdtemp())
    frozen = {name: {"model": str(team / "policies" / name), "trained": False} for name in ALONE.values()}
    policies = {**frozen, "student": {"model": "builtin:tiny", "learning_rate": 2e-3}}
    more = ["--model.policies", json.dumps(policies), "--data.iterations", str(options.iterations)]
    more += ["--trainer.callbacks+", "HeldOutEvaluation", "--trainer.callbacks.episodes", str(options.episodes)]
    started = time.perf_counter()
    call(*command_of("distillation/team", models, seed, options.turns, folder, *more))
    seconds = time.perf_counter() - started
    reports = {}
    for moment in ("before", "after"):
        (report,) = json.loads((folder / f"evaluation_{moment}.json").read_text()).values()
        reports[moment] = {name: found["value"] for name, found in report["metrics"].items()}
    after = reports["after"]
    found = {"student before": reports["before"]["student_accuracy"], "student": after["student_accuracy"]}
    found |= {"team": after[f"turn_{options.turns}_accuracy"], "majority": after["majority_accuracy"]}
    found |= {f"student - {name}": found["student"] - found[name] for name in ("team", "majority", "student before")}
    return found | {"seconds": seconds}


def main() -> None:
    """Train the team, distill it with every seed and print the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=40, help="of the distillation")
    parser.add_argument("--team-iterations", type=int, default=20, help="of the team's co-training")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=500, help="held-out questions")
    parser.add_argument("--models", type=Path, help="folder of examples/specialists.py; default: run it")
    parser.add_argument("--team", type=Path, help="folder of the co-training run; default: run it")
    options = parser.parse_args()
    models, team = options.models, options.team
    if models is None:
        models = Path(tempfile.mkdtemp())
        subprocess.run([sys.executable, "examples/specialists.py", "--output", str(models)], check=True)
    if team is None:
        team = Path(tempfile.mkdtemp())
        policies = {policy: {"model": str(models / name), "learning_rate": 3e-4} for name, policy in ALONE.items()}
        more = ["--model.policies", json.dumps(policies), "--data.iterations", str(options.team_iterations)]
        call(*command_of("teams/co_training", models, 0, options.turns, team, *more))
        print(f"trained the team in {team}", flush=True)
    file = ResultsFile(options.json)
    rows = [row for row in file.kept.get("rows", []) if "seed" in row]
    for seed in options.seeds:
        if all(row["seed"] != seed for row in rows):
            found = run(models, team, seed, options)
            rows.append({"seed": seed, **{name: round(value, 3) for name, value in found.items()}})
            print(json.dumps(rows[-1]), flush=True)
        file.write(file.begun(rows=[*rows, summary(rows)]))
    print(json.dumps(summary(rows)))


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the last row: means and intervals over the seeds."""
    return {"all seeds": {name: over_seeds([row[name] for row in rows]) for name in rows[0] if name != "seed"}}


if __name__ == "__main__":
    main()
