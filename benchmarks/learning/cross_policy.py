"""Train number guessing with and without stale snapshots that sample some turns, for several seeds.

    python benchmarks/learning/cross_policy.py [--seeds 0 1 2 3 4] [--iterations 30] [--arms none turn ...]
        [--json FILE]

    none        all turns by the current weights
    turn        a quarter of the turns by one snapshot, replaced every 10 iterations
    trajectory  a quarter of the trajectories by that snapshot
    several     a quarter of the turns by one of three snapshots

The game (examples/number_guessing.py) has up to four turns: guess a digit, with "higher" and "lower" as hints. Printed
are the held-out success and reward of the current weights after the run, and the mean over the seeds with its 95 %
interval (Student's t); the differences to ``none`` are paired by seed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import lightning
from seeds import ResultsFile, Seen, fit, mean_and_half, parser_of, silence

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.cross_policy import CrossPolicy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from number_guessing import NumberGuessing

ARMS: dict[str, CrossPolicy | None] = {
    "none": None,
    "turn": CrossPolicy(share=0.25, refresh=10),
    "trajectory": CrossPolicy(share=0.25, refresh=10, unit="trajectory"),
    "several": CrossPolicy(share=0.25, refresh=10, snapshots=3),
}
EPISODES = 512
"""Episodes of the evaluation after a run."""


def run(arm: str, seed: int, iterations: int) -> dict[str, float]:
    """Return the held-out figures after a run, and means of its last rollouts."""
    lightning.seed_everything(seed, verbose=False)
    algorithm = GRPO({"main": Policy("builtin:tiny", learning_rate=1e-3)})
    data = RolloutDataModule(
        NumberGuessing(),
        groups=8,
        group_size=16,
        iterations=iterations,
        sampling=Sampling(max_tokens=8),
        cross_policy=ARMS[arm],
        save_episodes=False,
        seed=seed,
    )
    seen, started = Seen(EPISODES), time.perf_counter()
    fit(algorithm, data, seen)
    last = seen.seen[-10:]
    found = {**seen.after, "seconds": time.perf_counter() - started}
    for name in ("rollout/entropy", "rollout/stale_turns", "rollout/stale_age", "train/clip_fraction"):
        found[name] = statistics.fmean(metrics.get(name, 0.0) for metrics in last)
    return found


def main() -> None:
    """Run all arms and print the table."""
    parser = parser_of(__doc__, arms=ARMS)
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    silence()
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for seed in options.seeds:
        for arm in options.arms:
            rows[arm].append(run(arm, seed, options.iterations))
            told = {name: round(value, 3) for name, value in rows[arm][-1].items()}
            print(json.dumps({"arm": arm, "seed": seed, **told}), flush=True)
            ResultsFile(options.json).write(rows)
    for arm, found in rows.items():
        for name in ("success", "reward"):
            mean, half = mean_and_half([row[name] for row in found])
            line = f"{arm:<11} {name:<8} {mean:.3f} +- {half:.3f}"
            if arm != "none" and "none" in rows:
                paired = [row[name] - before[name] for row, before in zip(found, rows["none"], strict=True)]
                line += "   against none {:+.3f} +- {:.3f}".format(*mean_and_half(paired))
            print(line)


if __name__ == "__main__":
    main()
