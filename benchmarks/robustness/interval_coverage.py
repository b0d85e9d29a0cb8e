"""Simulate the coverage of the 95 % interval of an accuracy, for tasks with correlated samples.

A task's success probability is drawn from a beta distribution with the given mean and intraclass correlation, its
samples from that probability. `before` divides the number of samples by the observed design effect, or treats them as
independent if there is none (all solved, none solved, one task); `tasks_as_trials` counts each task as one trial; `now`
is `share_interval`.

    python -m benchmarks.robustness.interval_coverage
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from mrlm_pl.evaluation.intervals import share_interval, wilson_interval

SHARES = (0.5, 0.8, 0.95, 0.97, 0.99)
SIZES = ((1, 8), (3, 8), (8, 8), (20, 8), (32, 4), (64, 16), (200, 2))
"""Numbers of tasks and of samples per task."""

CORRELATIONS = (0.0, 0.2, 0.5, 0.9, 1.0)
Counts = list[tuple[int, int]]


def before(groups: Counts) -> tuple[float, float]:
    """Return Wilson's interval with the samples divided by the observed design effect, at least 1."""
    trials, wins = sum(count for _, count in groups), sum(value for value, _ in groups)
    share = wins / trials
    independent, effect = share * (1 - share) / trials, 1.0
    if independent and len(groups) > 1:
        squares = math.fsum((value - share * count) ** 2 for value, count in groups)
        effect = max(1.0, len(groups) / (len(groups) - 1) * squares / trials**2 / independent)
    return wilson_interval(wins / effect, trials / effect)


def tasks_as_trials(groups: Counts) -> tuple[float, float]:
    """Return Wilson's interval with each task as one trial."""
    return wilson_interval(sum(value / count for value, count in groups), len(groups))


METHODS: dict[str, Callable[[Counts], tuple[float, float]]] = {
    "before": before,
    "tasks_as_trials": tasks_as_trials,
    "now": share_interval,
}


def simulated(share: float, tasks: int, samples: int, correlation: float, rounds: int) -> dict[str, list[float]]:
    """Return coverage and mean width of each method."""
    rng = np.random.default_rng([int(1000 * share), tasks, samples, int(1000 * correlation)])
    if correlation in (0, 1):
        chances = np.full((rounds, tasks), share) if correlation == 0 else rng.random((rounds, tasks)) < share
    else:
        scale = (1 - correlation) / correlation
        chances = rng.beta(share * scale, (1 - share) * scale, (rounds, tasks))
    counts = rng.binomial(samples, chances.astype(float))
    seen, times = np.unique(np.sort(counts, axis=1), axis=0, return_counts=True)
    found = {}
    for name, method in METHODS.items():
        intervals = np.array([method([(int(count), samples) for count in row]) for row in seen])
        held = (intervals[:, 0] <= share + 1e-12) & (share - 1e-12 <= intervals[:, 1])
        width = intervals[:, 1] - intervals[:, 0]
        found[name] = [round(float(np.average(values, weights=times)), 3) for values in (held, width)]
    return found


def main() -> None:
    """Simulate the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/interval_coverage.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for correlation in CORRELATIONS:
        for share in SHARES:
            for tasks, samples in SIZES:
                found = simulated(share, tasks, samples, correlation, options.rounds)
                rows.append(
                    {"share": share, "tasks": tasks, "samples": samples, "correlation": correlation}
                    | {name: {"coverage": value[0], "width": value[1]} for name, value in found.items()}
                )
                print(rows[-1], flush=True)
    summary = {
        name: {
            "least coverage": min(row[name]["coverage"] for row in rows),
            "least coverage of 20 tasks or more": min(row[name]["coverage"] for row in rows if row["tasks"] >= 20),
            "below .93": sum(row[name]["coverage"] < 0.93 for row in rows),
            "settings": len(rows),
        }
        for name in METHODS
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({**provenance(), "rounds": options.rounds, "summary": summary}).removesuffix("}")
    text = f'{head},\n"rows": [\n{lines}\n]}}\n'
    options.output.write_text(text, encoding="utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
