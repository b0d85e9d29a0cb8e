"""Measure algorithms that branch episodes: C3 and credit from replays against MAGRPO, Tree-GRPO against GRPO.

    python benchmarks/learning/branches.py [--experiments cost halves debate] [--arms MAGRPO C3 ...] [--seeds 0 1 ... 9]
        [--tokens N] [--json FILE]

    cost    generated tokens of a rollout of the tiny model, by compared decision and by credited episode
    halves  two agents must say different halves, both at once
    debate  two sides, one argument each, before the judge by rules; the return is the mean of both scores

In ``halves`` and ``debate`` every run has the same budget of generated tokens. Printed are the held-out reward of
the final weights, and its mean over the seeds with the 95 % interval (Student's t); the differences to MAGRPO are
paired by seed. ``--json`` keeps the file's rows of other experiments and budgets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from mrlm_environments import DebateEnvironment, Halves, MathEnvironment
from mrlm_environments.debate.judge_by_rules import RuleJudge
from seeds import Budget, ResultsFile, Seen, fit, mean_and_half, parser_of, provenance, silence

from mrlm_pl.algorithms import C3, CCPO, COMA, GRPO, MAGRPO, SHARP, Shapley, TreeGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from number_guessing import NumberGuessing

EPISODES = 128
"""Episodes of the evaluation after a run."""

ARMS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, int]]] = {
    "MAGRPO": (MAGRPO, {}, {"halves": 4, "debate": 4}),
    "COMA": (COMA, {}, {"halves": 4, "debate": 4}),
    "C3": (C3, {"alternatives": 3}, {"halves": 1, "debate": 2}),
    "C3 replay": (C3, {"alternatives": 4, "rest": "replay"}, {"debate": 2}),
    "CCPO": (CCPO, {}, {"halves": 4}),
    "CCPO other": (CCPO, {"absent": "other"}, {"halves": 4, "debate": 4}),
    "SHARP other": (SHARP, {"absent": "other"}, {"halves": 4}),
    "Shapley": (Shapley, {}, {"halves": 4}),
    "Shapley other": (Shapley, {"absent": "other"}, {"halves": 4, "debate": 4}),
}
"""Class, options and ``data.group_size`` by task. In ``halves`` nothing follows a message, and a replayed rest equals a
played one."""

TASKS: dict[str, dict[str, Any]] = {
    "halves": {"environment": Halves, "max_tokens": 4, "groups": 8, "budget": 2000},
    "debate": {
        "environment": lambda: DebateEnvironment(RuleJudge(words=8), reward="score", max_turns=1),
        "max_tokens": 24,
        "groups": 4,
        "budget": 6000,
    },
}
SEATS = {"halves": {"left": "first", "right": "second"}, "debate": {"pro": "first", "con": "second"}}


def learn(task: str, arm: str, seed: int, tokens: int) -> dict[str, float]:
    """Return the held-out reward after a run of the task's budget, and the totals of the run."""
    lightning.seed_everything(seed, verbose=False)
    cls, options, sizes = ARMS[arm]
    setting = TASKS[task]
    policies = {name: Policy("builtin:tiny", learning_rate=1e-3) for name in ("first", "second")}
    data = RolloutDataModule(
        setting["environment"](),
        groups=setting["groups"],
        group_size=sizes[task],
        iterations=1000,
        sampling=Sampling(max_tokens=setting["max_tokens"]),
        save_episodes=False,
        seed=seed,
    )
    budget = Budget(tokens, EPISODES)
    fit(cls(policies, SEATS[task], **options), data, budget)
    return {"reward": budget.after["reward"], **budget.totals("generated_tokens", "iteration", "episodes")}


def cost(arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return the generated tokens of a rollout, with the number of decisions or episodes that are compared."""
    rows: list[dict[str, Any]] = []
    for task in TASKS:
        for arm, (cls, options, sizes) in ARMS.items():
            if task not in sizes or arm not in arms:
                continue
            policies = {name: Policy("builtin:tiny") for name in ("first", "second")}
            algorithm = cls(policies, SEATS[task], **options)
            rows.append({"task": task, "arm": arm, **rollout(algorithm, TASKS[task], sizes[task], "rows")})
    games = {"math, 3 attempts": lambda: MathEnvironment(max_attempts=3), "number guessing": NumberGuessing}
    for task, environment in games.items():
        setting = {"environment": environment, "max_tokens": 24, "groups": 8}
        trees: dict[str, tuple[Callable[..., Any], int]] = {
            "GRPO": (GRPO, 12),
            "TreeGRPO 4 x (1 + 1 x 2)": (partial(TreeGRPO, nodes=2), 4),
            "TreeGRPO 2 x (1 + 2 x 3)": (partial(TreeGRPO, rounds=2, nodes=3), 2),
        }
        for arm, (cls, size) in trees.items():
            algorithm = cls({"main": Policy("builtin:tiny")})
            rows.append({"task": task, "arm": arm, **rollout(algorithm, setting, size, "episodes")})
    return rows


def rollout(algorithm: Any, setting: dict[str, Any], size: int, unit: str) -> dict[str, Any]:
    """Return what one rollout generated and how many rows or episodes its update compares."""
    lightning.seed_everything(0, verbose=False)
    compared: list[float] = []
    prepare = algorithm.prepare

    def counted(episodes: Any, *rest: Any) -> Any:
        tables = prepare(episodes, *rest)
        compared.append(len(episodes) if unit == "episodes" else sum(len(rows) for rows in tables.values()))
        return tables

    algorithm.prepare = counted
    data = RolloutDataModule(
        setting["environment"](),
        groups=setting["groups"],
        group_size=size,
        iterations=1,
        sampling=Sampling(max_tokens=setting["max_tokens"]),
        save_episodes=False,
    )
    seen = Seen()
    fit(algorithm, data, seen)
    (numbers,) = seen.seen
    tokens, replays = numbers["progress/generated_tokens"], numbers.get("rollout/branch_episodes", 0.0)
    return {
        "tokens": tokens,
        "replays": replays,
        unit: compared[0],
        f"{unit} per 1000 tokens": round(1000 * compared[0] / tokens, 1),
    }


def main() -> None:
    """Run the experiments and print the rows."""
    parser = parser_of(__doc__, seeds=10, experiments=["cost", *TASKS], arms=ARMS)
    parser.add_argument("--tokens", type=int, help="budget of generated tokens instead of the task's own")
    options = parser.parse_args()
    if {*options.experiments} & {*TASKS} and "MAGRPO" not in options.arms:
        parser.error("--arms lacks MAGRPO, which the others are compared with: add it")
    silence()
    file = ResultsFile(options.json)
    budgets = {name: options.tokens or TASKS[name]["budget"] for name in options.experiments if name in TASKS}
    measured = [("cost", None), *budgets.items()] if "cost" in options.experiments else [*budgets.items()]
    rows = [row for row in file.kept.get("rows", []) if (row["experiment"], row.get("budget")) not in measured]
    made = provenance(kept=file.kept if rows else None)

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        file.write({**made, "rows": rows})

    for experiment in options.experiments:
        if experiment == "cost":
            for row in cost(options.arms):
                add({"experiment": "cost", **row})
            continue
        of_all = {"experiment": experiment, "budget": budgets[experiment]}
        rewards: dict[str, list[float]] = {arm: [] for arm in options.arms if experiment in ARMS[arm][2]}
        for seed in options.seeds:
            for arm, found in rewards.items():
                row = learn(experiment, arm, seed, budgets[experiment])
                found.append(row["reward"])
                add({**of_all, "arm": arm, "seed": seed, **row})
        for arm, found in rewards.items():
            mean, half = mean_and_half(found)
            paired = [one - other for one, other in zip(found, rewards["MAGRPO"], strict=True)]
            difference, width = mean_and_half(paired)
            add(
                {
                    **of_all,
                    "arm": arm,
                    "mean": round(mean, 3),
                    "ci95": [round(mean - half, 3), round(mean + half, 3)],
                    "minus MAGRPO": round(difference, 3),
                    "ci95 of it": [round(difference - width, 3), round(difference + width, 3)],
                }
            )


if __name__ == "__main__":
    main()
