"""Run the quick-start for several seeds: held-out accuracy before and after, rewards by iteration, and CPU seconds.

    python benchmarks/learning/quickstart.py [--seeds 0 1 2 3 4] [--json benchmarks/results/quickstart.json]

``rewards`` are the mean rewards of the rollouts, one per iteration.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from few_values import mean_and_half
from provenance import provenance


def run(seed: int) -> dict[str, Any]:
    """Run one quick-start in its own process."""
    folder = Path(tempfile.mkdtemp()) / "run"
    command = [str(Path(sys.executable).with_name("mrlm")), "fit", "--config", "configs/quickstart.yaml"]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", str(folder)]
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"seed {seed} failed:\n{result.stderr[-3000:]}")
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    reports = {
        moment: json.loads((folder / f"evaluation_{moment}.json").read_text())["math"] for moment in ("before", "after")
    }
    with (folder / "metrics.csv").open() as file:
        rewards = [round(float(row["rollout/reward"]), 4) for row in csv.DictReader(file) if row["rollout/reward"]]
    return {
        "seed": seed,
        "cpu_s": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
        "wall_s": round(wall, 1),
        **{
            moment: {"accuracy": report["accuracy"], "ci95": [round(bound, 3) for bound in report["accuracy_ci95"]]}
            for moment, report in reports.items()
        },
        "rewards": rewards,
    }


def main() -> None:
    """Run the seeds and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        rows.append(run(seed))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        summary = {moment: mean_and_half([row[moment]["accuracy"] for row in rows]) for moment in ("before", "after")}
        options.json.write_text(json.dumps({**provenance(), "summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
