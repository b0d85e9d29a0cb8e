"""Measure held-out reward before and after the algorithms of teams and of turns, for several seeds, in one table.

    python benchmarks/learning/team_algorithms.py [--algorithms MAGRPO IPPO ...] [--seeds 0 1 2 3 4] [--json FILE]

Each starts from builtin:tiny on a quick task. ``rewards`` are the mean rewards of the rollouts, one per iteration.
Sizes are those of a run of a few CPU seconds, not of a comparison at equal cost: pairs.py and branches.py compare.
``--json`` keeps the runs that its file has and is written after each: the same command continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning
from lightning.pytorch import Callback
from mrlm_environments import CollaborativeReasoningEnvironment, CoordinationGame, Helpers, MathEnvironment
from seeds import ResultsFile, fit, held_out, parser_of, silence

from mrlm_pl import algorithms
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.policy import Policy

EPISODES = 128
"""Episodes of an evaluation."""

tiny = partial(Policy, "builtin:tiny", learning_rate=1e-3)


@dataclass(frozen=True)
class Case:
    """An algorithm on its task.

    Args:
        environment: makes the environment.
        seats: policy of each agent; {} is one policy for all.
        data: options of the rollouts.
        max_tokens: maximum number of tokens of a reply.
        options: options of the algorithm.
        critic: whether it takes a centralized critic.
    """

    environment: Callable[[], Environment]
    seats: Mapping[str, str]
    data: Mapping[str, Any]
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    critic: bool = False


PAIR = Case(
    CoordinationGame,
    {"row": "first", "column": "second"},
    {"groups": 8, "group_size": 8, "iterations": 20},
    max_tokens=4,
)
CRITICS = replace(PAIR, data={**PAIR.data, "iterations": 12, "passes": 2}, options={"value_learning_rate": 1e-2})
ATTEMPTS = Case(
    partial(MathEnvironment, max_attempts=3), {}, {"groups": 8, "group_size": 8, "iterations": 20}, max_tokens=32
)

CASES: dict[str, Case] = {
    **dict.fromkeys(("MAREINFORCE", "MAGRPO", "MARLOO", "MAREMAX", "COMA", "ATGRPO"), PAIR),
    "DrMAS": replace(PAIR, options={"zero_variance": "exclude"}),
    **dict.fromkeys(("CCPO", "SHARP", "Shapley"), PAIR),
    "C3": replace(PAIR, data={**PAIR.data, "group_size": 2}, options={"alternatives": 3}),
    "IPPO": replace(CRITICS, options={**CRITICS.options, "reward": "team"}),
    "MAPPO": replace(CRITICS, critic=True),
    "RAE": replace(PAIR, seats={}, data={"groups": 64, "group_size": 1, "iterations": 20}),
    "MADPO": replace(PAIR, data={**PAIR.data, "passes": 2}, options={"beta": 0.5}),
    "MGRPO": Case(
        partial(Helpers, cost=0.0),
        {"planner": "planner", **{f"helper@{number}": "helper" for number in (1, 2, 3)}},
        {"groups": 8, "group_size": 16, "iterations": 20},
        max_tokens=4,
        options={"calls_per_group": 16},
    ),
    "MAPoRL": Case(
        partial(CollaborativeReasoningEnvironment, max_turns=3),
        {"solver_1": "first", "solver_2": "second"},
        {"groups": 16, "group_size": 8, "passes": 2, "iterations": 6},
        max_tokens=24,
        options={"value_learning_rate": 1e-2, "alpha1": 0.1, "beta1": 0.1},
    ),
    "GiGPO": ATTEMPTS,
    "IGPO": ATTEMPTS,
    "TreeGRPO": replace(ATTEMPTS, data={**ATTEMPTS.data, "group_size": 4}, options={"rounds": 1, "nodes": 2}),
    "GDPO": replace(ATTEMPTS, environment=partial(MathEnvironment, difficulty=(1, 1))),
}


class BeforeAndAfter(Callback):
    """Evaluate the weights before and after a run, and keep the mean reward of each rollout."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.rewards: dict[int, float] = {}

    def evaluate(self, trainer: Any, moment: str) -> None:
        self.found[moment] = round(held_out(trainer, EPISODES).mean_reward, 4)

    def on_train_start(self, trainer: Any, *arguments: Any) -> None:
        self.evaluate(trainer, "before")

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        seen = trainer.callback_metrics
        self.rewards[int(seen["progress/iteration"])] = round(float(seen["rollout/reward"]), 3)

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.evaluate(trainer, "after")


def run(name: str, seed: int) -> dict[str, Any]:
    """Return one row of the table."""
    lightning.seed_everything(seed, verbose=False)
    started, case = time.process_time(), CASES[name]
    policies = {policy: tiny() for policy in sorted({*case.seats.values()}) or ["main"]}
    sampling = Sampling(max_tokens=case.max_tokens)
    environment = case.environment()
    data = RolloutDataModule(environment, sampling=sampling, save_episodes=False, seed=seed, **case.data)
    options = {**case.options, "critic": tiny()} if case.critic else case.options
    measured = BeforeAndAfter()
    algorithm = getattr(algorithms, name)(policies, dict(case.seats) or None, **options)
    fit(algorithm, data, measured)
    row = {"algorithm": name, "environment": environment.name, "seed": seed, **measured.found}
    return {**row, "cpu_s": round(time.process_time() - started, 1), "rewards": [*measured.rewards.values()]}


def main() -> None:
    """Run every algorithm with every seed and print a row of each."""
    options = parser_of(__doc__, algorithms=CASES).parse_args()
    silence()
    file = ResultsFile(options.json)
    written = file.begun(rows=file.kept.get("rows", []))
    done = {(row["algorithm"], row["seed"]) for row in written["rows"]}
    for seed in options.seeds:
        for name in options.algorithms:
            if (name, seed) in done:
                continue
            written["rows"].append(run(name, seed))
            print(json.dumps(written["rows"][-1]), flush=True)
            file.write(written)


if __name__ == "__main__":
    main()
