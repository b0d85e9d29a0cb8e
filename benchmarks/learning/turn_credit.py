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
import logging
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
from branches import Budget, fit

from mrlm_pl.algorithms import GRPO, GiGPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Outcome, SeededTasks, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy

for folder in (Path(__file__).parents[1], Path(__file__).parents[2] / "examples"):
    sys.path.insert(0, str(folder))
from few_values import mean_and_half  # noqa: E402
from number_guessing import NumberGuessing  # noqa: E402
from provenance import provenance  # noqa: E402

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


class Measure(Budget):
    """Record the reward of each rollout too, and evaluate the final weights."""

    def __init__(self, budget: float, environment: str) -> None:
        super().__init__(budget, environment)
        self.rewards: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        self.rewards.append(self.seen["rollout/reward"])

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        report = trainer.datamodule.evaluate(self.environment, split="test", episodes=EPISODES)
        self.after = {"reward": report.mean_reward, "success": report.accuracy}
        self.after["rollouts"] = statistics.fmean(self.rewards)


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
    measure = Measure(options.tokens, TASKS[task].name)
    fit(algorithm, data, seed, measure)
    names = ("progress/generated_tokens", "progress/iteration", "progress/seconds")
    return {**measure.after, **{name.split("/")[1]: measure.seen[name] for name in names}}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width of each measure, by arm, and of its paired difference to GRPO."""
    found: dict[str, dict[str, list[float]]] = {}
    for arm, rows in runs.items():
        found[arm] = {}
        for name in MEASURES:
            values = {name: [row[name] for row in rows]}
            if arm != "GRPO" and "GRPO" in runs:
                values[f"{name} minus GRPO"] = [
                    row[name] - other[name] for row, other in zip(rows, runs["GRPO"], strict=True)
                ]
            for key, numbers in values.items():
                found[arm][key] = [round(number, 3) for number in mean_and_half(numbers)]
    return found


def main() -> None:
    """Run all arms and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=int, default=BUDGET)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--entropy", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"tasks": {}}
    kept = before["tasks"]
    again = all(task in options.tasks and {*found["runs"]} <= {*options.arms} for task, found in kept.items())
    written: dict[str, Any] = {**provenance(kept=None if again else before), "tasks": kept}
    for task in options.tasks:
        known = kept.get(task, {}).get("runs", {})
        runs: dict[str, list[dict[str, float]]] = {**known, **{arm: [] for arm in options.arms}}
        for seed in options.seeds:
            for arm in options.arms:
                runs[arm].append({"seed": seed, **run(task, arm, seed, options)})
                print(json.dumps({"task": task, "arm": arm, **runs[arm][-1]}), flush=True)
        written["tasks"][task] = {"summary": summary(runs), "runs": runs}
        if options.json:
            options.json.write_text(json.dumps(written, indent=1) + "\n")
        for arm, found in summary(runs).items():
            print(f"{task:<9} {arm:<12}", json.dumps(found))


if __name__ == "__main__":
    main()
