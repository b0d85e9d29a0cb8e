"""Run the quick-start for several seeds: held-out accuracy before and after, rewards by iteration, and CPU seconds.

    python benchmarks/learning/quickstart.py [--seeds 0 1 2 3 4] [--json benchmarks/results/quickstart.json]

``rewards`` are the mean rewards of the rollouts, one per iteration.
"""

from __future__ import annotations

import csv
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seeds import MRLM, ResultsFile, call, mean_and_half, parser_of, provenance, seconds_of_children

Report = Mapping[str, Any]
"""A report of ``HeldOutEvaluation`` on an environment."""


def accuracy(report: Report) -> dict[str, Any]:
    """Return the accuracy of a report with its interval."""
    return {"accuracy": report["accuracy"], "ci95": [round(bound, 3) for bound in report["accuracy_ci95"]]}


def run(
    seed: int,
    config: str = "configs/quickstart.yaml",
    *changes: str,
    kept: Callable[[Report], dict[str, Any]] = accuracy,
) -> dict[str, Any]:
    """Run one configuration of one environment in its own process.

    Args:
        changes: extra options of the command.
        kept: returns the kept numbers of a report, that before or that after the run.
    """
    folder = Path(tempfile.mkdtemp()) / "run"
    options = ("--seed_everything", str(seed), "--trainer.default_root_dir", str(folder))
    used, started = seconds_of_children(), time.perf_counter()
    call(MRLM, "fit", "--config", config, *options, *changes)
    wall = time.perf_counter() - started
    reports = {}
    for moment in ("before", "after"):
        (reports[moment],) = json.loads((folder / f"evaluation_{moment}.json").read_text()).values()
    with (folder / "metrics.csv").open() as file:
        rewards = [round(float(row["rollout/reward"]), 4) for row in csv.DictReader(file) if row["rollout/reward"]]
    return {
        "seed": seed,
        "cpu_s": round(seconds_of_children() - used, 1),
        "wall_s": round(wall, 1),
        **{moment: kept(report) for moment, report in reports.items()},
        "rewards": rewards,
    }


def main() -> None:
    """Run the seeds and print a row each."""
    options = parser_of(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        rows.append(run(seed))
        print(json.dumps(rows[-1]), flush=True)
    summary = {moment: mean_and_half([row[moment]["accuracy"] for row in rows]) for moment in ("before", "after")}
    ResultsFile(options.json).write({**provenance(), "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
