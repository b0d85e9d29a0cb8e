"""Measure effects that papers claim, each against the arm that the paper compares with.

    python benchmarks/learning/effects.py [--effects rae league ...] [--seeds 0 1 2 3 4]
        [--folder FOLDER] [--json FILE]

    dr_mas        a planner and its helpers, whose rewards differ: gradient norms, by what normalizes the advantages
    asynchronous  configs/scaling/async.yaml, shortened, against synchronous rollouts of as many episodes
    rae           self-play at tic-tac-toe in which alpha always begins: the score against random moves
    rae_rules     the same after the recipe tiny_moves, which teaches the rules; equal generated tokens
    rae_small     the same with the model of `make small-model`, against no baseline, as the paper's code without RAE
    league        tic-tac-toe against past snapshots and against itself, likewise
    at_grpo       a planner and an executor in a grid, after the recipe tiny_path; equal generated tokens
    at_grpo_long  the same in a larger grid, with longer paths
    proposer      solvers of problems that a trained proposer writes, shared or separate, against those of a frozen one
    at_grpo_alone, at_grpo_alone_long
                  both grids, against one agent that moves without a planner, with GRPO

The first arm is the baseline. Means over the seeds have 95 % intervals (Student's t), the differences to the baseline
are paired by seed. ``--json`` keeps the runs that its file has, and is written after each.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Callback
from mrlm_callbacks import SelfPlay
from mrlm_callbacks.anchor_games import AnchorGames
from mrlm_callbacks.snapshot_pool import Draw
from mrlm_environments import Helpers, MathEnvironment, PlanPath, ProposerEnvironment, TicTacToe
from mrlm_environments.games.tic_tac_toe import MARKS
from seeds import MRLM, Budget, ResultsFile, Seen, call, fit, held_out, paired, parser_of, silence
from torch import Tensor

from mrlm_pl.advantages import group_means, group_normalized_advantages
from mrlm_pl.algorithms import ATGRPO, GRPO, RAE, REINFORCE, DrMAS
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment, Message, Observations, Step, Task
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.learner.policies.reference import KL
from mrlm_pl.losses import Correction
from mrlm_pl.policy import Policy
from mrlm_pl.runs import evaluate
from mrlm_pl.seeding import keyed_random

ROOT = Path(__file__).parents[2]
SMALL = "runs/small-model/policies/main"
EPISODES = 300
"""Episodes of the evaluation after a run."""


class OverAllAgents(GRPO):
    """GRPO with one mean and one standard deviation over all agents of a task's episodes."""

    def with_baselines(self, returns: Returns) -> Returns:
        return replace(returns, baseline=group_means(returns.reward, returns.group))

    def advantages(self, returns: Returns) -> Tensor:
        return group_normalized_advantages(returns.reward, returns.group)


class AlphaBegins(TicTacToe):
    """Tic-tac-toe in which alpha always begins, so that the roles are worth different returns."""

    def reset(self, task: Task) -> Observations:
        return super().reset(replace(task, data={**task.data, "first": "alpha"}))


class Chance(TicTacToe):
    """Tic-tac-toe in which beta takes a random free cell, and alone alpha is asked."""

    def reset(self, task: Task) -> Observations:
        self.random = keyed_random("chance", task.key)
        observations = super().reset(task)
        return observations if "alpha" in observations else self.answered().observations

    def step(self, actions: Mapping[str, Message]) -> Step:
        step = super().step(actions)
        step = step if step.done else self.answered()
        return replace(step, rewards={agent: reward for agent, reward in step.rewards.items() if agent == "alpha"})

    def answered(self) -> Step:
        """Return beta's move."""
        free = [cell for cell in self._board if cell not in MARKS]
        return super().step({"beta": Message("assistant", self.random.choice(free))})


class GradientNorms(Seen):
    """Record each policy's gradient norm in every update, and evaluate the final weights."""

    @property
    def found(self) -> dict[str, float]:
        """Return the numbers of the run."""
        found = dict(self.after)
        for name in (name for name in self.seen[-1] if name.endswith("grad_norm")):
            policy, norms = name.split("/")[1], self.of_updates(name)
            found |= {f"largest norm of {policy}": max(norms), f"mean norm of {policy}": statistics.fmean(norms)}
        return found


class Accuracy(Seen):
    """Evaluate the final weights, and record the lag of the tokens that they were trained on."""

    @property
    def found(self) -> dict[str, float]:
        """Return the numbers of the run."""
        lags = [numbers.get("async/lag", 0.0) for numbers in self.seen]
        return {"accuracy": self.after["success"], "lag": statistics.fmean(lags)}


def against_chance(trainer: Any) -> dict[str, Any]:
    """Let the weights of ``learner`` play both sides against a player that moves by chance."""
    data, learner = trainer.datamodule, trainer.lightning_module.policy("learner")
    sampling = data.validation_sampling
    report = evaluate(learner, Chance(), num_episodes=EPISODES, seed=data.seed, sampling=sampling, device="cpu")
    return {"score": (1 + report.agents["alpha"].reward) / 2, "illegal": report.metrics["illegal"].value}


class OnProblems(Callback):
    """Let the weights before and after the training solve problems, and record the proposer's last rewards."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, *arguments: Any) -> None:
        self.evaluate(trainer, " before")

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.evaluate(trainer, "")
        for name, metric in (("valid", "proposer/valid"), ("proposer's reward", "agent/proposer/reward")):
            self.found[name] = float(trainer.callback_metrics[f"rollout/{metric}"])

    def evaluate(self, trainer: Any, moment: str) -> None:
        data, learner = trainer.datamodule, trainer.lightning_module.policy("learner")
        problems = MathEnvironment(difficulty=(1, 1), kinds=["arithmetic"])
        report = evaluate(learner, problems, num_episodes=EPISODES, sampling=data.validation_sampling, device="cpu")
        self.found[f"accuracy{moment}"] = report.accuracy


class AgainstChance(Callback):
    """Let the final weights play against chance."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.found = against_chance(trainer)


class AtTheBudget(Budget):
    """End the run with its budget of generated tokens, and evaluate the weights before and after."""

    def __init__(self, tokens: float, rewards: bool = True) -> None:
        super().__init__(tokens)
        self.rewards = rewards
        self.found: dict[str, float] = {}

    def on_train_start(self, trainer: Any, *arguments: Any) -> None:
        self.evaluate(trainer, " before")

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.evaluate(trainer, "")
        self.found["tokens"] = self.totals("generated_tokens")["generated_tokens"]

    def evaluate(self, trainer: Any, moment: str) -> None:
        report = held_out(trainer, EPISODES)
        self.found[f"success{moment}"] = report.accuracy
        if self.rewards:
            self.found[f"reward{moment}"] = report.mean_reward


class AgainstChanceAtTheBudget(AtTheBudget):
    """End the run likewise, let the weights before and after play against chance, and record the last entropy."""

    def evaluate(self, trainer: Any, moment: str) -> None:
        self.found |= {f"{name}{moment}": value for name, value in against_chance(trainer).items()}
        if self.seen:
            self.found["entropy"] = self.seen[-1]["rollout/entropy"]


def after(folder: Path, recipe: str, demonstrations: str, made: Sequence[str] = (), fitted: Sequence[str] = ()) -> str:
    """Return the policy of a recipe, which runs unless the folder has it.

    Args:
        folder: folder of the recipe's rows and run.
        recipe: name of its configuration.
        demonstrations: NAME of the script ``make_NAME_demonstrations.py``, which writes its rows.
        made: options of that script.
        fitted: options of ``mrlm fit``.
    """
    policy, rows = folder / "run/policies/main", str(folder / "rows.jsonl")
    script = str(ROOT / f"examples/tiny_model/make_{demonstrations}_demonstrations.py")
    config = str(ROOT / f"configs/recipes/{recipe}.yaml")
    if not policy.is_dir():
        call(sys.executable, script, "--output", rows, *made)
        call(MRLM, "fit", "--config", config, "--output", str(folder / "run"), "--data.train", rows, *fitted)
    return str(policy)


def small(folder: Path, learning_rate: float, **recipe: Any) -> str:
    """Return the policy of a recipe that begins with the model of ``make small-model``; see :func:`after`."""
    if not (ROOT / SMALL).is_dir():
        raise SystemExit(f"{SMALL} is missing: run `make small-model` first (ten minutes)")
    begins = ("--model.policies.main.model", str(ROOT / SMALL))
    return after(folder, fitted=(*begins, "--model.policies.main.learning_rate", str(learning_rate)), **recipe)


@dataclass(frozen=True)
class Arm:
    """An algorithm, with what differs from the effect's other arms.

    Args:
        cls: class of the algorithm.
        options: options of the class.
        seats: policy of each agent; {} is ``learner`` for all. ``opponent`` is frozen.
        data: options of the rollouts.
        callbacks: makes extra callbacks.
        environment: makes an environment that replaces the effect's.
        model: returns a model that replaces the effect's.
    """

    cls: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    seats: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Callback]] = tuple
    environment: Callable[[], Environment] | None = None
    model: Callable[[Path], str] | None = None


@dataclass(frozen=True)
class Effect:
    """Arms on one environment; the first is the baseline.

    Args:
        environment: makes the environment.
        arms: arms by name.
        data: options of the rollouts.
        sampling: sampling settings of a turn.
        measure: makes the callback whose ``found`` are the numbers of a run.
        learning_rate: learning rate of all policies.
        options: options of all arms' classes.
        model: returns the model that all policies begin with, and may keep it in a folder.
    """

    environment: Callable[[], Environment]
    arms: Mapping[str, Arm]
    data: Mapping[str, Any]
    sampling: Sampling
    measure: Callable[[], Any]
    learning_rate: float = 5e-4
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[Path], str] = lambda folder: "builtin:tiny"


def asynchronous(lag: int) -> Arm:
    """Return the arm with this ``max_lag``."""
    return Arm(GRPO, {"correction": Correction("truncated")}, data={"mode": "async", "max_lag": lag})


def league(draw: Draw) -> Arm:
    """Return the arm whose opponents are past snapshots."""
    anchors = AnchorGames(every=1000, games=1)  # AgainstChance measures all arms alike
    return Arm(
        REINFORCE,
        seats={"alpha": "learner", "beta": "opponent"},
        callbacks=lambda: [SelfPlay(snapshot_every=5, draw=draw, anchors=anchors)],
    )


def proposer(policy: str) -> Arm:
    """Return the arm whose problems are this policy's."""
    options = {"kl": KL(0.02)}
    return Arm(GRPO, options, seats={"proposer": policy, **{f"solver_{number}": "learner" for number in (1, 2, 3, 4)}})


HELPERS = {"planner": "planner", **{f"helper@{number}": "helper" for number in (1, 2, 3)}}
LONG: dict[str, Any] = {"size": 4, "walls": 3, "distance": [3, 6], "turns": 8}
GAMES = {"groups": 64, "group_size": 1, "iterations": 60}

EFFECTS = {
    "dr_mas": Effect(
        partial(Helpers, cost=0.0),
        {"all agents": Arm(OverAllAgents, seats=HELPERS), "DrMAS": Arm(DrMAS, seats=HELPERS)},
        data={"groups": 8, "group_size": 8, "iterations": 24},
        sampling=Sampling(max_tokens=4),
        measure=partial(GradientNorms, EPISODES),
        learning_rate=1e-3,
    ),
    "asynchronous": Effect(
        partial(MathEnvironment, difficulty=(1, 1)),
        {"sync": Arm(GRPO), **{f"max_lag {lag}": asynchronous(lag) for lag in (1, 2, 4)}},
        data={"groups": 8, "group_size": 8, "iterations": 24},
        sampling=Sampling(max_tokens=32),
        measure=partial(Accuracy, EPISODES),
    ),
    "rae": Effect(
        AlphaBegins,
        {"REINFORCE": Arm(REINFORCE), "RAE": Arm(RAE)},
        data=GAMES,
        sampling=Sampling(temperature=1.5, max_tokens=1),
        measure=AgainstChance,
        learning_rate=2e-3,
    ),
    "league": Effect(
        TicTacToe,
        {"self-play": Arm(REINFORCE), "latest": league("latest"), "uniform": league("uniform")},
        data=GAMES,
        sampling=Sampling(temperature=1.5, max_tokens=1),
        measure=AgainstChance,
        learning_rate=2e-3,
    ),
    "proposer": Effect(
        partial(ProposerEnvironment, reward="uncertainty"),
        {"frozen": proposer("opponent"), "shared": proposer("learner"), "separate": proposer("proposer")},
        data={"groups": 8, "group_size": 8, "iterations": 60},
        sampling=Sampling(max_tokens=24),
        measure=OnProblems,
    ),
    "at_grpo": Effect(
        PlanPath,
        {"GRPO": Arm(GRPO), "AT-GRPO": Arm(ATGRPO), "all agents": Arm(OverAllAgents)},
        data={"groups": 8, "group_size": 8, "iterations": 1000},
        sampling=Sampling(max_tokens=1),
        measure=partial(AtTheBudget, 20_000),
        options={"optimization": Optimization(schedule="constant_with_warmup", warmup_steps=10)},
        model=partial(after, recipe="tiny_path", demonstrations="path"),
    ),
}
EFFECTS["at_grpo_long"] = replace(
    EFFECTS["at_grpo"],
    environment=partial(PlanPath, **LONG),
    arms={"GRPO": Arm(GRPO), "AT-GRPO": Arm(ATGRPO)},
    measure=partial(AtTheBudget, 30_000),
    model=partial(after, recipe="tiny_path", demonstrations="path", made=("--settings", json.dumps(LONG))),
)
EFFECTS["rae_rules"] = replace(
    EFFECTS["rae"],
    data={**GAMES, "iterations": 1000},
    sampling=Sampling(max_tokens=1),
    measure=partial(AgainstChanceAtTheBudget, 25_000),
    learning_rate=1e-3,
    model=partial(after, recipe="tiny_moves", demonstrations="move"),
)
EFFECTS["rae_small"] = replace(
    EFFECTS["rae_rules"],
    arms={"REINFORCE": Arm(REINFORCE, {"baseline": "none"}), "RAE": Arm(RAE)},
    learning_rate=2.5e-4,
    model=partial(small, learning_rate=7.5e-4, recipe="tiny_moves", demonstrations="move"),
)
for grid, (settings, tokens) in {"": ({}, 20_000), "_long": (LONG, 30_000)}.items():
    alone = {**settings, "planner": False}
    made = ("--settings", json.dumps(alone), "--episodes", "12000")  # as many rows as the team's
    EFFECTS[f"at_grpo_alone{grid}"] = replace(
        EFFECTS[f"at_grpo{grid}"],
        arms={
            "one agent": Arm(
                GRPO,
                environment=partial(PlanPath, **alone),
                model=partial(after, recipe="tiny_path", demonstrations="path", made=made),
            ),
            "AT-GRPO": Arm(ATGRPO),
        },
        measure=partial(AtTheBudget, tokens, rewards=False),
    )


def run(effect: Effect, arm: Arm, seed: int, folder: Path) -> dict[str, float]:
    """Return the numbers of a run; the folder keeps the model that it begins with."""
    model = (arm.model or effect.model)(folder)
    lightning.seed_everything(seed, verbose=False)
    started = time.process_time()
    policies = {
        name: Policy(model, learning_rate=effect.learning_rate, trained=name != "opponent")
        for name in sorted({*arm.seats.values()} or {"learner"})
    }
    data = RolloutDataModule(
        (arm.environment or effect.environment)(),
        sampling=effect.sampling,
        save_episodes=False,
        seed=seed,
        **{**effect.data, **arm.data},
    )
    measure = effect.measure()
    algorithm = arm.cls(policies, dict(arm.seats) or None, **{**effect.options, **arm.options})
    fit(algorithm, data, *arm.callbacks(), measure)
    found = {name: round(value, 4) for name, value in measure.found.items()}
    return {**found, "cpu_seconds": round(time.process_time() - started, 1)}


def summary(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width of each number by arm, and of its differences by seed to the first arm."""
    (first, rows), *_ = runs.items()
    return paired(runs, first, [name for name in rows[0] if name not in ("seed", "cpu_seconds")])


def main() -> None:
    """Run all effects and print the rows."""
    parser = parser_of(__doc__, effects=EFFECTS)
    parser.add_argument("--folder", type=Path, help="of the recipes; default: a temporary one")
    options = parser.parse_args()
    silence()
    folder = options.folder or Path(tempfile.mkdtemp())
    file = ResultsFile(options.json)
    written = file.begun(effects=file.kept.get("effects", {}))
    for name in options.effects:
        effect = EFFECTS[name]
        found = written["effects"].setdefault(name, {"runs": {}})
        for seed, arm in itertools.product(options.seeds, effect.arms):
            rows = found["runs"].setdefault(arm, [])
            if not any(row["seed"] == seed for row in rows):
                kept = folder / name / (arm if effect.arms[arm].model else "")
                rows.append({"seed": seed, **run(effect, effect.arms[arm], seed, kept)})
                print(json.dumps({"effect": name, "arm": arm, **rows[-1]}), flush=True)
                if {*map(len, found["runs"].values())} == {len(rows)} and len(rows) > 1:
                    found["summary"] = summary(found["runs"])
                file.write(written)
        for arm, numbers in summary(found["runs"]).items():
            print(f"{name:<12} {arm:<10}", json.dumps(numbers))


if __name__ == "__main__":
    main()
