"""Does each algorithm learn? Held-out accuracy before and after its configuration, for several seeds, in one table.

    python benchmarks/learning.py [--configs quickstart ppo dapo ...] [--seeds 0 1 2] [--json out.json]

Every configuration starts from builtin:tiny on the generated problems of difficulty 1 and is evaluated on the same 500
held-out problems before and after; the intervals are Wilson's, at 95 %. CPU seconds are those of the whole process with
both evaluations.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIGS = (
    "quickstart",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "ppo",
)


def run(config: str, seed: int, overrides: list[str]) -> dict[str, object]:
    """One run in a process of its own."""
    folder = Path(tempfile.mkdtemp()) / "run"
    command = [str(Path(sys.executable).with_name("mrlm")), "fit", "--config", f"configs/{config}.yaml"]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", str(folder), *overrides]
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{config}, seed {seed} failed:\n{result.stderr[-3000:]}")
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    reports = {
        moment: json.loads((folder / f"evaluation_{moment}.json").read_text())["math"] for moment in ("before", "after")
    }
    return {
        "config": config,
        "seed": seed,
        "cpu_s": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
        "wall_s": round(wall, 1),
        **{
            moment: {"accuracy": report["accuracy"], "ci95": [round(bound, 3) for bound in report["accuracy_ci95"]]}
            for moment, report in reports.items()
        },
    }


def main() -> None:
    """Run every configuration with every seed and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), help="names of files in configs/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    rows = []
    for config in options.configs:
        for seed in options.seeds:
            rows.append(run(config, seed, overrides))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
