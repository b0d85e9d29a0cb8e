"""Compare algorithms with the one that each extends, where the extension can matter, at equal generated tokens.

    python benchmarks/learning/pairs.py [--pairs components helpers ...] [--seeds 0 1 2 3 4] [--json FILE]

    components  GDPO against GRPO: 1 for a right answer, and up to .1 more the shorter the reply is
    helpers     M-GRPO against GRPO: a planner and the helpers that it asks, which earn .5 for the right letter
    attempts    IGPO against GRPO: three attempts at a problem with a reference answer

Printed are the held-out reward, success and reward components of the final weights; their means over the seeds have
95 % intervals (Student's t), the differences to GRPO are paired by seed. ``--json`` keeps the runs that its file has,
and is written after each seed: the same command continues.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from branches import Budget, fit
from mrlm_environments import Helpers, MathEnvironment

from mrlm_pl.algorithms import GDPO, GRPO, IGPO, MGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment, Outcome
from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from few_values import mean_and_half
from provenance import provenance

EPISODES = 256
"""Episodes of the evaluation after a run."""


class BriefMath(MathEnvironment):
    """Math problems with .1 more for an empty reply, falling to 0 at 32 characters."""

    def reply(self, message: Message) -> Outcome:
        outcome = super().reply(message)
        brevity = 0.1 * max(0.0, 1 - len(message.content) / 32)
        return replace(outcome, components={**outcome.components, "brevity": brevity})


@dataclass(frozen=True)
class Pair:
    """Algorithms on one environment; the first is the baseline.

    Args:
        environment: makes it.
        arms: class and options by name.
        tokens: budget of generated tokens of a run.
        data: options of the rollouts.
        max_tokens: of a reply.
        seats: the policy of each agent; {} is one policy for all.
    """

    environment: Callable[[], Environment]
    arms: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]
    tokens: int
    data: Mapping[str, Any]
    max_tokens: int
    seats: Mapping[str, str] = field(default_factory=dict)


PAIRS = {
    "components": Pair(
        partial(BriefMath, difficulty=(1, 2)),
        {"GRPO": (GRPO, {}), "GDPO": (GDPO, {}), "GDPO, brevity .1": (GDPO, {"weights": {"brevity": 0.1}})},
        tokens=5000,
        data={"groups": 8, "group_size": 8},
        max_tokens=32,
    ),
    "helpers": Pair(
        partial(Helpers, cost=0.0),
        {"GRPO": (GRPO, {}), "MGRPO": (MGRPO, {"calls_per_group": 16})},
        tokens=20000,
        data={"groups": 8, "group_size": 16},
        max_tokens=4,
        seats={"planner": "planner", **{f"helper@{number}": "helper" for number in (1, 2, 3)}},
    ),
    "attempts": Pair(
        partial(MathEnvironment, max_attempts=3),
        {"GRPO": (GRPO, {}), "IGPO": (IGPO, {})},
        tokens=12000,
        data={"groups": 8, "group_size": 8},
        max_tokens=48,
    ),
}


class HeldOut(Budget):
    """End the run with its budget, and record reward, success and reward components of the final weights."""

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        report = trainer.datamodule.evaluate(self.environment, split="test", episodes=EPISODES)
        self.after = {"reward": report.mean_reward, "success": report.accuracy, **report.components}


def run(pair: Pair, arm: str, seed: int) -> dict[str, float]:
    """Return the held-out numbers after a run, and its totals."""
    lightning.seed_everything(seed, verbose=False)
    started = time.process_time()
    cls, options = pair.arms[arm]
    policies = {name: Policy("builtin:tiny", learning_rate=1e-3) for name in sorted({*pair.seats.values()} or {"main"})}
    environment = pair.environment()
    data = RolloutDataModule(
        environment,
        iterations=1000,
        sampling=Sampling(max_tokens=pair.max_tokens),
        save_episodes=False,
        seed=seed,
        **pair.data,
    )
    held_out = HeldOut(pair.tokens, environment.name)
    fit(cls(policies, dict(pair.seats) or None, **options), data, seed, held_out)
    totals = {name: held_out.seen[f"progress/{name}"] for name in ("generated_tokens", "iteration")}
    return {**held_out.after, **totals, "cpu_seconds": time.process_time() - started}


def summary(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width of each number by arm, and of its differences to GRPO by seed.

    A reward component that no episode of a run had is 0, as those of the helpers where the planner asks none.
    """
    names = {name for rows in runs.values() for row in rows for name in row if name != "seed"}
    found: dict[str, dict[str, list[float]]] = {}
    for arm, rows in runs.items():
        found[arm] = {}
        for name in sorted(names):
            values = {name: [row.get(name, 0.0) for row in rows]}
            if arm != "GRPO":
                pairs = zip(rows, runs["GRPO"], strict=True)
                values[f"{name} minus GRPO"] = [row.get(name, 0.0) - other.get(name, 0.0) for row, other in pairs]
            for key, numbers in values.items():
                found[arm][key] = [round(number, 4) for number in mean_and_half(numbers)]
    return found


def main() -> None:
    """Run all pairs and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else None
    written = {**provenance(kept=before), "pairs": before["pairs"] if before else {}}
    for name in options.pairs:
        runs = written["pairs"].setdefault(name, {"runs": {arm: [] for arm in PAIRS[name].arms}})["runs"]
        for seed in options.seeds:
            for arm, rows in runs.items():
                if any(row["seed"] == seed for row in rows):
                    continue
                rows.append({"seed": seed, **run(PAIRS[name], arm, seed)})
                print(json.dumps({"pair": name, "arm": arm, **rows[-1]}), flush=True)
                if options.json and all(len(others) == len(rows) for others in runs.values()):
                    written["pairs"][name]["summary"] = summary(runs)
                    options.json.write_text(json.dumps(written, indent=1) + "\n")
        for arm, found in summary(runs).items():
            print(f"{name:<11} {arm:<10}", json.dumps(found))


if __name__ == "__main__":
    main()
