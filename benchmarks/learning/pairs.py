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

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning
from mrlm_environments import Helpers, MathEnvironment
from seeds import Budget, ResultsFile, fit, paired, parser_of, silence

from mrlm_pl.algorithms import GDPO, GRPO, IGPO, MGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment, Outcome
from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy

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
        environment: makes the environment.
        arms: class and options by name.
        tokens: number of generated tokens of a run.
        data: options of the rollouts.
        max_tokens: maximum number of tokens of a reply.
        seats: policy of each agent; {} is one policy for all.
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


def run(pair: Pair, arm: str, seed: int) -> dict[str, float]:
    """Return the held-out numbers after a run, and its totals."""
    lightning.seed_everything(seed, verbose=False)
    started = time.process_time()
    cls, options = pair.arms[arm]
    policies = {name: Policy("builtin:tiny", learning_rate=1e-3) for name in sorted({*pair.seats.values()} or {"main"})}
    data = RolloutDataModule(
        pair.environment(),
        iterations=1000,
        sampling=Sampling(max_tokens=pair.max_tokens),
        save_episodes=False,
        seed=seed,
        **pair.data,
    )
    budget = Budget(pair.tokens, EPISODES)
    fit(cls(policies, dict(pair.seats) or None, **options), data, budget)
    totals = budget.totals("generated_tokens", "iteration")
    return {**budget.after, **budget.components, **totals, "cpu_seconds": time.process_time() - started}


def summary(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width of each number by arm, and of its differences to GRPO by seed."""
    names = {name for rows in runs.values() for row in rows for name in row if name != "seed"}
    return paired(runs, "GRPO", sorted(names))


def main() -> None:
    """Run all pairs and print the rows."""
    options = parser_of(__doc__, pairs=PAIRS).parse_args()
    silence()
    file = ResultsFile(options.json)
    written = file.begun(pairs=file.kept.get("pairs", {}))
    for name in options.pairs:
        runs = written["pairs"].setdefault(name, {"runs": {arm: [] for arm in PAIRS[name].arms}})["runs"]
        for seed in options.seeds:
            for arm, rows in runs.items():
                if any(row["seed"] == seed for row in rows):
                    continue
                rows.append({"seed": seed, **run(PAIRS[name], arm, seed)})
                print(json.dumps({"pair": name, "arm": arm, **rows[-1]}), flush=True)
                if all(len(others) == len(rows) for others in runs.values()):
                    written["pairs"][name]["summary"] = summary(runs)
                    file.write(written)
        for arm, found in summary(runs).items():
            print(f"{name:<11} {arm:<10}", json.dumps(found))


if __name__ == "__main__":
    main()
