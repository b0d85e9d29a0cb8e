"""Co-train two specialists in three turns, against each alone with the same number of decisions.

    python benchmarks/learning/co_training.py [--seeds 0 1 2] [--iterations 20] [--json out.json]

The models are those of ``examples/specialists.py``, trained once. ``team`` trains both with
configs/algorithms/teams/co_training.yaml: two solvers, three turns, six decisions per episode. ``sums`` and
``differences`` train one model alone in one turn, with the same algorithm and number of decisions, in six times as many
updates. Accuracies are on held-out questions: ``turn_k`` is the mean over the solvers, ``team`` the majority in the
last turn, ``before`` the untrained discussion. Intervals are 95 % over the seeds (Student's t).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seeds import MRLM, ResultsFile, call, parser_of
from teams import over_seeds

EPISODES, TURNS, SOLVERS = 500, 3, 2
ALONE = {"sums": "first", "differences": "second"}


def command_of(models: Path, seed: int, iterations: int, folder: Path) -> list[str]:
    """Options of ``mrlm train`` for the team."""
    policies = {policy: {"model": str(models / name), "learning_rate": 3e-4} for name, policy in ALONE.items()}
    data = {split: str(models / f"{split}.jsonl") for split in ("train", "validation", "test")}
    command = [MRLM, "train", "--config", "configs/algorithms/teams/co_training.yaml", "--output", str(folder)]
    command += ["--seed_everything", str(seed), "--data.iterations", str(iterations)]
    command += ["--model.policies", json.dumps(policies), "--data.environment.data", json.dumps(data)]
    command += ["--trainer.callbacks+", "HeldOutEvaluation", "--trainer.callbacks.episodes", str(EPISODES)]
    return [*command, "--trainer.limit_val_batches", "0"]


def alone(command: Sequence[str], models: Path, name: str, iterations: int) -> list[str]:
    """Options for one model alone in one turn, with the same number of decisions."""
    policy = {"main": {"model": str(models / name), "learning_rate": 3e-4}}
    changed = [*command, "--model.policies", json.dumps(policy), "--model.seats", "{solver_1: main}"]
    changed += ["--data.environment.solvers", "1", "--data.environment.max_turns", "1"]
    return [*changed, "--data.iterations", str(iterations * TURNS * SOLVERS)]


def accuracies(folder: Path, moment: str, turns: int) -> dict[str, float]:
    """Return the accuracy of each turn, and of the team's answer."""
    (report,) = json.loads((folder / f"evaluation_{moment}.json").read_text()).values()
    found = {f"turn_{turn}": report["metrics"][f"turn_{turn}_accuracy"]["value"] for turn in range(1, turns + 1)}
    return {**found, "team": report["accuracy"]}


def run(seed: int, models: Path, folder: Path, iterations: int) -> dict[str, dict[str, float]]:
    """Return the rows of one seed, by name."""
    command = command_of(models, seed, iterations, folder / "team")
    started = time.perf_counter()
    call(*command)
    seconds = time.perf_counter() - started
    rows = {moment: accuracies(folder / "team", moment, TURNS) for moment in ("before", "after")}
    rows["after"]["seconds"] = seconds
    for name in ALONE:
        command = command_of(models, seed, iterations, folder / name)
        call(*alone(command, models, name, iterations))
        rows[f"{name} alone, before"] = accuracies(folder / name, "before", 1)
        rows[f"{name} alone"] = accuracies(folder / name, "after", 1)
    return rows


def main() -> None:
    """Train the models, run every seed and print its rows."""
    parser = parser_of(__doc__, seeds=3)
    parser.add_argument("--iterations", type=int, default=20, help="iterations of the team")
    parser.add_argument("--models", type=Path, help="folder of examples/specialists.py; default: run it")
    options = parser.parse_args()
    models = options.models
    if models is None:
        models = Path(tempfile.mkdtemp())
        subprocess.run([sys.executable, "examples/specialists.py", "--output", str(models)], check=True)
    rows: list[dict[str, Any]] = []
    values: dict[str, dict[str, list[float]]] = {}
    for seed in options.seeds:
        for name, found in run(seed, models, Path(tempfile.mkdtemp()), options.iterations).items():
            rows.append({"run": name, "seed": seed, **{key: round(value, 3) for key, value in found.items()}})
            print(json.dumps(rows[-1]), flush=True)
            for key, value in found.items():
                values.setdefault(name, {}).setdefault(key, []).append(value)
    for name, lists in values.items():
        rows.append({"run": name, "all seeds": {key: over_seeds(of) for key, of in lists.items()}})
        print(json.dumps(rows[-1]), flush=True)
    ResultsFile(options.json).write(rows)


if __name__ == "__main__":
    main()
