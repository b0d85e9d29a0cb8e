"""Train a shortened quick-start with several updates per rollout, once for each token loss, for several seeds.

    python benchmarks/learning/token_losses.py [--seeds 0 1 2 3 4] [--arms ppo sapo ...] [--json FILE]

Each rollout of 16 groups of 8 episodes serves four updates (two passes in two mini-batches), so that later updates are
off-policy: the losses differ there alone. Printed are the held-out accuracy after the run, `train/loss_weight` and
`train/clip_fraction` as means over its updates, and the mean accuracy over the seeds with its 95 % interval (Student's
t); the differences to PPO's clip are paired by seed. ``--json`` keeps the runs of other arms in the file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
from mrlm_environments.math.environment import MathEnvironment
from seeds import ResultsFile, Seen, fit, parser_of, provenance, rounded, silence

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy

NAMES = ("ppo", "gspo", "luspo", "gmpo", "cispo", "sapo", "vespo", "dppo")
ARMS: dict[str, dict[str, Any]] = {
    **{name: {"loss": name} for name in NAMES},
    "off_policy_threshold": {"off_policy_threshold": 0.02},
    "top_entropy": {"top_entropy": 0.2},
    "entropy_target": {"entropy": {"target": 0.3}},
    "importance_weighted_kl": {"kl": {"coefficient": 0.01, "estimator": "k3_importance_weighted"}},
    "reference_sync": {"kl": {"coefficient": 0.01}, "reference_sync": {"every": 1, "decay": 0.95}},
}
EPISODES = 400
"""Episodes of the evaluation after a run."""


def run(arm: str, seed: int, iterations: int) -> dict[str, float]:
    """Return the held-out accuracy after a run, and means over its updates."""
    lightning.seed_everything(seed, verbose=False)
    algorithm = GRPO({"main": Policy("builtin:tiny", learning_rate=5e-4)}, **ARMS[arm])
    data = RolloutDataModule(
        MathEnvironment(difficulty=(1, 1)),
        groups=16,
        group_size=8,
        passes=2,
        minibatches=2,
        iterations=iterations,
        sampling=Sampling(max_tokens=32),
        save_episodes=False,
        seed=seed,
    )
    seen = Seen(EPISODES)
    fit(algorithm, data, seen)
    found = {"seed": seed, "accuracy": seen.after["success"]}
    for name in ("loss_weight", "clip_fraction", "off_policy_masked", "entropy_coefficient", "grad_norm"):
        if values := seen.of_updates(f"train/{name}"):
            found[name] = statistics.fmean(values)
    return found


def summary(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return each arm's mean accuracy and the paired difference to `ppo`, with the half widths of their intervals."""
    found: dict[str, dict[str, float]] = {}
    for arm, runs in rows.items():
        values = {"accuracy": [run["accuracy"] for run in runs]}
        if arm != "ppo" and "ppo" in rows:
            pairs = zip(runs, rows["ppo"], strict=True)
            values["difference"] = [run["accuracy"] - other["accuracy"] for run, other in pairs]
        found[arm] = {"seeds": len(runs)}
        for name, numbers in values.items():
            found[arm] |= dict(zip((name, f"{name}_half"), rounded(numbers), strict=True))
    return found


def main() -> None:
    """Run all arms and print the table."""
    parser = parser_of(__doc__, arms=ARMS)
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args()
    silence()
    file = ResultsFile(options.json)
    kept = {arm: runs for arm, runs in file.kept.get("runs", {}).items() if arm not in options.arms}
    rows: dict[str, list[dict[str, float]]] = {**kept, **{arm: [] for arm in options.arms}}
    for seed in options.seeds:
        for arm in options.arms:
            rows[arm].append(run(arm, seed, options.iterations))
            print(json.dumps({"arm": arm, **rows[arm][-1]}), flush=True)
    found = {"iterations": options.iterations, "episodes": EPISODES, "summary": summary(rows), "runs": rows}
    file.write({**provenance(kept=file.kept if kept else None), **found})
    for arm, numbers in summary(rows).items():
        print(f"{arm:<22}", "  ".join(f"{name} {value:+.3f}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
