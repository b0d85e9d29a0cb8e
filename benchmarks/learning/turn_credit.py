"""Compare credit of turns in games where each step counts: GiGPO and per-turn GRPO against GRPO.

    python benchmarks/learning/turn_credit.py [--tasks wheels ...] [--arms GRPO GiGPO ...] [--seeds 0 1 2 3 4]
        [--tokens N] [--json FILE]

    wheels    turn four wheels to their digits, one after the other; each right one earns a quarter
    guessing  guess a digit in four turns; the observation is "higher" or "lower" (examples/number_guessing.py)

Every run has the same budget of generated tokens. Printed are the held-out reward and success of the final weights,
and the mean reward of the run's rollouts; their means over the seeds have 95 % intervals (Student's t), the
differences to GRPO are paired by seed. ``--json`` keeps the runs of other arms in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import lightning
from seeds import Budget, ResultsFile, fit, paired, parser_of, provenance, silence

from mrlm_pl.algorithms import GRPO, GiGPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Outcome, SeededTasks, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from number_guessing import NumberGuessing

ARMS: dict[str, tuple[type, dict[str, Any]]] = {
    "GRPO": (GRPO, {}),
    "GRPO turn": (GRPO, {"credit": "turn"}),
    "GiGPO": (GiGPO, {}),
    "GiGPO, entropy .2": (GiGPO, {"entropy": {"coefficient": 0.2}}),
    "GiGPO paper": (GiGPO, {"turn_baseline": "paper"}),
}
BUDGET = 30000
"""Generated tokens of a run."""
EPISODES = 512
"""Episodes of the evaluation after a run."""
MEASURES = ("reward", "success", "rollouts")


class Wheels(SingleAgentEnvironment):
    """Turn four wheels to their digits, one after the other; each right one earns a quarter."""

    name = "wheels"
    DIGITS = "7294"

    def tasks(self, split: str) -> SeededTasks:
        return SeededTasks(
            self.name, split, lambda rng: {"lock": rng.randint(100, 999)}, lambda data: str(data["lock"])
        )

    def begin(self, task: Task) -> str:
        self.turned: list[bool] = []
        return "Wheel 1"

    def reply(self, message: Message) -> Outcome:
        digits = [letter for letter in message.content if letter.isdigit()]
        self.turned.append(digits[:1] == [self.DIGITS[len(self.turned)]])
        components = {"right": self.turned[-1] / len(self.DIGITS)}
        if len(self.turned) < len(self.DIGITS):
            return Outcome(components, observation=f"Wheel {len(self.turned) + 1}")
        return Outcome(components, success=all(self.turned))


TASKS = {"wheels": Wheels, "guessing": NumberGuessing}


def run(task: str, arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the measures of a run, and its totals."""
    lightning.seed_everything(seed, verbose=False)
    cls, settings = ARMS[arm]
    policies = {"main": Policy("builtin:tiny", learning_rate=options.learning_rate)}
    algorithm = cls(policies, **{"entropy": {"coefficient": options.entropy}, **settings})
    data = RolloutDataModule(
        TASKS[task](),
        groups=options.groups,
        group_size=options.group_size,
        iterations=1000,
        sampling=Sampling(max_tokens=options.max_tokens),
        save_episodes=False,
        seed=seed,
    )
    budget = Budget(options.tokens, EPISODES)
    fit(algorithm, data, budget)
    after = {**budget.after, "rollouts": statistics.fmean(budget.of_updates("rollout/reward"))}
    return {**after, **budget.totals("generated_tokens", "iteration", "seconds")}


def main() -> None:
    """Run all arms and print the rows."""
    parser = parser_of(__doc__, tasks=TASKS, arms=ARMS)
    parser.add_argument("--tokens", type=int, default=BUDGET)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--entropy", type=float, default=0.1)
    options = parser.parse_args()
    file = ResultsFile(options.json)
    silence()
    kept = file.kept.get("tasks", {})
    again = all(task in options.tasks and {*found["runs"]} <= {*options.arms} for task, found in kept.items())
    written: dict[str, Any] = {**provenance(kept=None if again else file.kept), "tasks": kept}
    for task in options.tasks:
        known = kept.get(task, {}).get("runs", {})
        runs: dict[str, list[dict[str, float]]] = {**known, **{arm: [] for arm in options.arms}}
        for seed in options.seeds:
            for arm in options.arms:
                runs[arm].append({"seed": seed, **run(task, arm, seed, options)})
                print(json.dumps({"task": task, "arm": arm, **runs[arm][-1]}), flush=True)
        written["tasks"][task] = {"summary": paired(runs, "GRPO", MEASURES, digits=3), "runs": runs}
        file.write(written)
        for arm, found in paired(runs, "GRPO", MEASURES, digits=3).items():
            print(f"{task:<9} {arm:<12}", json.dumps(found))


if __name__ == "__main__":
    main()
