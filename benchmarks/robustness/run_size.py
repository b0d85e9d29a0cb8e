"""Measure the files of the quick start: bytes per iteration of each part of the run folder, and bytes at its end.

    python -m benchmarks.robustness.run_size [--iterations 10 40] [--json benchmarks/results/run_size.json]

The rates are the differences of two runs with different numbers of iterations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.provenance import provenance

ROOT = Path(__file__).parents[2]
PARTS = ("episodes", "metrics.csv", "tensorboard", "checkpoints", "policies")


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each part of a run folder, and of all others together."""
    found = dict.fromkeys((*PARTS, "other"), 0)
    for path in folder.rglob("*"):
        if path.is_file():
            part = path.relative_to(folder).parts[0]
            found[part if part in PARTS else "other"] += path.stat().st_size
    return found


def run(iterations: int) -> dict[str, int]:
    """Train the quick start without its evaluations, and return its sizes."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--config", "configs/quickstart.yaml", "--trainer.callbacks", "null", "--trainer.accelerator", "cpu"]
        command = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", *options, "--data.iterations", str(iterations)]
        subprocess.run([*command, "--output", folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return sizes(Path(folder))


def measured(iterations: Sequence[int]) -> dict[str, Mapping[str, float]]:
    """Return the bytes at the end of the longer run, and those of an iteration by the difference of both."""
    short, long = (run(count) for count in iterations)
    count = iterations[1] - iterations[0]
    return {"at the end": long, "per iteration": {part: (long[part] - short[part]) / count for part in long}}


def main() -> None:
    """Measure and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, nargs=2, default=(10, 40))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {**provenance(), "iterations": list(arguments.iterations), "bytes": measured(arguments.iterations)}
    print(json.dumps(found["bytes"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
