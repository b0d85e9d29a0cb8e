"""Train a shortened quick-start with several updates per rollout, once for each token loss, for several seeds.

    python benchmarks/learning/token_losses.py [--seeds 0 1 2 3 4] [--arms ppo sapo ...] [--json FILE]

Each rollout of 16 groups of 8 episodes serves four updates (two passes in two mini-batches), so that later updates are
off-policy: the losses differ there alone. Printed are the held-out accuracy after the run, `train/loss_weight` and
`train/clip_fraction` as means over its updates, and the mean accuracy over the seeds with its 95 % interval (Student's
t); the differences to PPO's clip are paired by seed. ``--json`` keeps the runs of other arms in the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Callback
from mrlm_environments.math.environment import MathEnvironment

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from few_values import mean_and_half
from provenance import provenance
from quiet_trainer import quiet_trainer

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


class Measure(Callback):
    """Record the metrics of each update, and evaluate the final weights."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.accuracy = 0.0

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.accuracy = trainer.datamodule.evaluate("math", split="test", episodes=EPISODES).accuracy


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
    measure = Measure()
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(max_epochs=1, default_root_dir=folder, gradient_clip_val=1.0, callbacks=[measure])
        trainer.fit(algorithm, data)
    found = {"seed": seed, "accuracy": measure.accuracy}
    for name in ("loss_weight", "clip_fraction", "off_policy_masked", "entropy_coefficient", "grad_norm"):
        values = [metrics[f"train/{name}"] for metrics in measure.seen if f"train/{name}" in metrics]
        if values:
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
            mean, half = mean_and_half(numbers)
            found[arm] |= {name: round(mean, 4), f"{name}_half": round(half, 4)}
    return found


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"runs": {}}
    kept = {arm: runs for arm, runs in before["runs"].items() if arm not in options.arms}
    rows: dict[str, list[dict[str, float]]] = {**kept, **{arm: [] for arm in options.arms}}
    for seed in options.seeds:
        for arm in options.arms:
            rows[arm].append(run(arm, seed, options.iterations))
            print(json.dumps({"arm": arm, **rows[arm][-1]}), flush=True)
    if options.json:
        found = {"iterations": options.iterations, "episodes": EPISODES, "summary": summary(rows), "runs": rows}
        made = provenance(kept=before if kept else None)
        options.json.write_text(json.dumps({**made, **found}, indent=1) + "\n")
    for arm, numbers in summary(rows).items():
        print(f"{arm:<22}", "  ".join(f"{name} {value:+.3f}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
