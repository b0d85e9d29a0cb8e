"""Compare a team with one policy and its majority vote at the same number of generated tokens per problem.

    python examples/tiny_model/make_reasoning_demonstrations.py --output runs/tiny-reasoning.jsonl
    mrlm train --config configs/recipes/tiny_reasoning.yaml --output runs/tiny-reasoning
    python benchmarks/learning/budget.py [--arms GRPO MAPoRL MAGRPO] [--seeds 0 1 2 3 4] [--tokens N] [--model FOLDER]
        [--json FILE]

    GRPO      one policy answers once; the majority of several samples is its answer
    MAPoRL    two policies answer, read each other and answer again: four decisions
    MAGRPO    the same team, trained on turn trees

All start from the same model, which solves a third of the problems in any turn, and generate the same number of tokens
in training. Each is evaluated before and after on the same held-out problems of collaborative_reasoning: the points of
a row are the generated tokens per problem and the accuracy, by number of samples. A majority with as many tokens as a
team takes k samples of some problems and k + 1 of the others. Means over the seeds have 95 % intervals (Student's t),
differences are paired by seed. ``--json`` keeps the runs that its file has, and is written after each.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
from mrlm_environments import CollaborativeReasoningEnvironment
from seeds import Budget, ResultsFile, fit, parser_of, rounded, silence

from mrlm_pl.algorithms import GRPO, MAGRPO, MAPoRL
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.summary import evaluation_specs
from mrlm_pl.grouping import grouped
from mrlm_pl.policy import Policy

ARMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int]] = {
    "GRPO": (GRPO, {}, {"group_size": 8}, 1),
    "MAPoRL": (MAPoRL, {"value_learning_rate": 1e-2}, {"group_size": 8, "passes": 2}, 2),
    "MAGRPO": (MAGRPO, {}, {"group_size": 4}, 2),
}
"""Class, options, options of the rollouts and number of agents."""
BASELINE = "GRPO"
PROBLEMS, SAMPLES, MAX_TOKENS = 300, 6, 24
"""Held-out problems, samples of each of one policy, tokens of a reply."""

Points = Sequence[Sequence[float]]
"""Generated tokens per problem and accuracy, of 1, 2, ... samples."""


class BeforeAndAfter(Budget):
    """End the run with its budget, and record the points of the first and the final weights."""

    def __init__(self, tokens: float, environment: Environment, agents: int) -> None:
        super().__init__(tokens)
        self.judge, self.samples = environment, SAMPLES if agents == 1 else 1
        self.points: dict[str, Points] = {}

    def measure(self, trainer: Any, moment: str) -> None:
        data = trainer.datamodule
        specs = evaluation_specs(self.judge, PROBLEMS * self.samples, "test", data.seed, self.samples)
        episodes = data.play(specs, data.validation_sampling)
        self.points[moment] = points(episodes, self.judge, self.samples)

    def on_train_start(self, trainer: Any, *arguments: Any) -> None:
        self.measure(trainer, "before")

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.measure(trainer, "after")


def points(episodes: Sequence[Episode], environment: Environment, samples: int) -> Points:
    """Return the points of 1 to ``samples`` samples of each problem: a majority is that of each k samples in turn."""
    problems = [*grouped((episode.task.key, episode) for episode in episodes).values()]
    tokens = sum(row.num_actions for episode in episodes for row in episode.rows()) / len(episodes)
    found = [(round(tokens, 2), round(statistics.fmean(bool(episode.success) for episode in episodes), 4))]
    for k in range(2, samples + 1):
        right = []
        for played in problems:
            said = [episode.rows()[0].messages[-1].content for episode in played]
            blocks = [said[start : start + k] for start in range(0, samples - k + 1, k)]
            right.append(statistics.fmean(bool(environment.majority(played[0].task, block)) for block in blocks))
        found.append((round(k * tokens, 2), round(statistics.fmean(right), 4)))
    return found


def at_tokens(curve: Points, tokens: float) -> float:
    """Return the accuracy with this mean number of tokens: some problems have k samples and the others k + 1.

    >>> at_tokens([(10, 0.4), (20, 0.4), (30, 0.6)], 25)
    0.5

    Raises:
        ValueError: the curve does not reach it.
    """
    for (low, worse), (high, better) in itertools.pairwise(curve):
        if low <= tokens <= high:
            return worse + (better - worse) * (tokens - low) / (high - low)
    raise ValueError(f"{tokens} tokens are not between {curve[0][0]} and {curve[-1][0]}; take other numbers of samples")


def run(arm: str, seed: int, tokens: int, model: str) -> dict[str, Any]:
    """Return the points before and after a run, and its totals."""
    lightning.seed_everything(seed, verbose=False)
    started = time.process_time()
    cls, options, data, agents = ARMS[arm]
    environment = CollaborativeReasoningEnvironment(solvers=agents, max_turns=agents)
    policies = {name: Policy(model, learning_rate=1e-3) for name in ("first", "second")[:agents]}
    seats = dict(zip(environment.agents, policies, strict=True))
    rollouts = RolloutDataModule(
        environment,
        groups=16,
        iterations=1000,
        sampling=Sampling(max_tokens=MAX_TOKENS),
        save_episodes=False,
        seed=seed,
        **data,
    )
    measure = BeforeAndAfter(tokens, environment, agents)
    fit(cls(policies, seats, **options), rollouts, measure)
    totals = measure.totals("generated_tokens", "iteration")
    return {**measure.points, **totals, "cpu_seconds": round(time.process_time() - started, 1)}


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width by arm and moment: tokens, accuracy, and the differences to majorities of one policy.

    ``minus untrained`` and ``minus trained`` are those to the majority with as many tokens; of one policy, to one
    sample.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for arm, rows in runs.items():
        for moment in ("before", "after"):
            values: dict[str, list[float]] = {
                "tokens": [row[moment][0][0] for row in rows],
                "accuracy": [row[moment][0][1] for row in rows],
            }
            if arm != BASELINE:
                for name, of in (("untrained", "before"), ("trained", "after")):
                    others = [
                        at_tokens(one[of], tokens) for one, tokens in zip(runs[BASELINE], values["tokens"], strict=True)
                    ]
                    values[name] = others
                    values[f"minus {name}"] = [a - b for a, b in zip(values["accuracy"], others, strict=True)]
            found[f"{arm}, {moment}"] = {name: rounded(of) for name, of in values.items()}
    return found


def main() -> None:
    """Run all arms and print the rows."""
    parser = parser_of(__doc__, arms=ARMS)
    parser.add_argument("--tokens", type=int, default=40_000, help="generated tokens of a run")
    parser.add_argument("--model", default="runs/tiny-reasoning/policies/main", help="that all runs start from")
    options = parser.parse_args()
    silence()
    file = ResultsFile(options.json)
    runs: dict[str, list[dict[str, Any]]] = file.kept.get("runs", {})
    written = file.begun(training_tokens=options.tokens, problems=PROBLEMS, runs=runs)
    for seed, arm in itertools.product(options.seeds, options.arms):
        rows = runs.setdefault(arm, [])
        if not any(row["seed"] == seed for row in rows):
            rows.append({"seed": seed, **run(arm, seed, options.tokens, options.model)})
            print(json.dumps({"arm": arm, **rows[-1]}), flush=True)
            file.write(written)
    written["summary"] = summary(runs)
    file.write(written)
    for name, numbers in written["summary"].items():
        print(f"{name:<16}", json.dumps(numbers))


if __name__ == "__main__":
    main()
