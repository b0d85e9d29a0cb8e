"""Train a small model on tasks of AgentBench: on a hurried expert, then with GRPO and GiGPO, and a team with IPPO.

    python benchmarks/learning/agentbench.py [--environments webshop knowledge_graph alfworld]
        [--arms GRPO GiGPO ...] [--seeds 0 1 2] [--tokens N] [--folder FOLDER] [--json FILE]

For each environment, alone and as a team, the recipe runs once (configs/recipes/tiny_agentbench.yaml, seed 0). Every
run starts from its policy and has the same budget of generated tokens of all agents. Held-out tasks are played before
and after it: in the house those of the split test, in the shop and the graph later ones of the split train that are not
in the recipe's rows, because a small model cannot know the products and relations of the split test.

Means over the seeds have 95 % intervals (Student's t); differences are paired by seed. Runs that ``--json``
holds already are not repeated, and ``--folder`` keeps the recipes' policies.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
from seeds import MRLM, Budget, ResultsFile, call, fit, parser_of, rounded, silence

import mrlm_pl
from mrlm_pl.algorithms import GRPO, IPPO, GiGPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Task, TaskSource
from mrlm_pl.evaluation.summary import problem_of
from mrlm_pl.policy import Policy

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples/tiny_model"))
from make_agentbench_demonstrations import ROWS, make_environment  # noqa: E402

ARMS: dict[str, tuple[type, bool]] = {
    "GRPO": (GRPO, False),
    "GiGPO": (GiGPO, False),
    "IPPO": (IPPO, False),
    "IPPO, team": (IPPO, True),
}
"""Algorithm, and whether a team plays."""
PEERS = {"GiGPO": "GRPO", "IPPO, team": "IPPO"}
"""Arms, each with the one that it is compared with."""
HELD_OUT = {"webshop": ("train", 1_000_000), "knowledge_graph": ("train", 1_000_000), "alfworld": ("test", 0)}
"""Split and first index of the held-out tasks."""
BUDGET = {"webshop": 60_000, "knowledge_graph": 150_000, "alfworld": 80_000}
"""Generated tokens of a run."""
GROUPS, GROUP_SIZE, SAMPLING, LEARNING_RATE = 8, 8, Sampling(max_tokens=24), 1e-3
EPISODES = 300
"""Episodes of an evaluation."""
MEASURES = ("reward", "success")


def recipe(environment: str, team: bool, folder: Path) -> Path:
    """Return the policy of the recipe, which runs unless the folder has it."""
    policy = folder / "run/policies/main"
    if not policy.is_dir():
        made = ("--environment", environment, *(["--team"] if team else []), "--output", str(folder))
        call(sys.executable, str(ROOT / "examples/tiny_model/make_agentbench_demonstrations.py"), *made)
        config = str(ROOT / "configs/recipes/tiny_agentbench.yaml")
        data = ("--model.policies.main.model", str(folder / "untrained"), "--data.train", str(folder / "rows.jsonl"))
        call(MRLM, "fit", "--config", config, "--output", str(folder / "run"), *data)
    return policy


class HeldOut(TaskSource):
    """Tasks that were chosen before."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self.size = tasks, len(tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]


@functools.cache
def held_out(environment: str) -> HeldOut:
    """Return the tasks of an evaluation; those of the split train pose no problem of the recipe's rows."""
    split, first = HELD_OUT[environment]
    source = make_environment(environment).tasks(split)
    known = {problem_of(source[index]) for index in range(ROWS)} if split == "train" else set()
    later = (source[index] for index in itertools.count(first))
    return HeldOut([*itertools.islice((task for task in later if problem_of(task) not in known), EPISODES)])


def evaluated(policy: Policy, environment: str, team: bool, seed: int) -> dict[str, float]:
    """Return the mean reward and the success rate on held-out tasks."""
    played: Any = make_environment(environment, team=team)
    played.tasks = lambda split: held_out(environment)
    report = mrlm_pl.evaluate(policy, played, num_episodes=EPISODES, seed=seed, sampling=SAMPLING)
    return {"reward": report.mean_reward, "success": report.accuracy or 0.0}


def run(environment: str, arm: str, start: Path, seed: int, tokens: int) -> dict[str, Any]:
    """Return the measures before and after a run, and its totals."""
    lightning.seed_everything(seed, verbose=False)
    cls, team = ARMS[arm]
    policy = Policy(str(start), learning_rate=LEARNING_RATE)
    row: dict[str, Any] = {"seed": seed, "before": evaluated(policy, environment, team, seed)}
    used, budget = time.process_time(), Budget(tokens)
    data = RolloutDataModule(
        make_environment(environment, team=team),
        groups=GROUPS,
        group_size=GROUP_SIZE,
        iterations=1000,
        sampling=SAMPLING,
        save_episodes=False,
        seed=seed,
    )
    fit(cls({"main": policy}), data, budget)
    row["cpu_s"] = round(time.process_time() - used, 1)
    row["after"] = evaluated(policy, environment, team, seed)
    return row | budget.totals("generated_tokens", "iteration", "episodes")


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width of each measure, by arm; differences to the start and to a peer are paired by seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for arm, rows in runs.items():
        values: dict[str, list[float]] = {}
        peer = PEERS.get(arm, "")
        others = {row["seed"]: row for row in runs.get(peer, ())}
        for name in MEASURES:
            for moment in ("before", "after"):
                values[f"{name} {moment}"] = [row[moment][name] for row in rows]
            values[f"{name} gained"] = [row["after"][name] - row["before"][name] for row in rows]
            if others and {row["seed"] for row in rows} == set(others):
                pairs = [(row["after"], others[row["seed"]]["after"]) for row in rows]
                values[f"{name} minus {peer}"] = [own[name] - other[name] for own, other in pairs]
        found[arm] = {key: rounded(numbers, digits=3) for key, numbers in values.items()}
    return found


def main() -> None:
    """Run all arms and print the rows."""
    parser = parser_of(__doc__, seeds=3, environments=HELD_OUT, arms=ARMS)
    parser.add_argument("--tokens", type=int, help="budget of generated tokens instead of the environment's own")
    parser.add_argument("--folder", type=Path, help="of the recipes; default: a temporary one")
    options = parser.parse_args()
    silence()
    folder = options.folder or Path(tempfile.mkdtemp())
    file = ResultsFile(options.json)
    kept = file.kept.get("environments", {})
    written = file.begun(episodes=EPISODES, environments=kept)
    for environment in options.environments:
        runs = {**{arm: [] for arm in options.arms}, **kept.get(environment, {}).get("runs", {})}
        tokens = options.tokens or BUDGET[environment]
        if (spent := kept.get(environment, {}).get("tokens", tokens)) != tokens:
            raise SystemExit(f"{options.json} has {environment} with {spent} tokens; give --tokens {spent}")
        for seed, arm in itertools.product(options.seeds, options.arms):
            if all(row["seed"] != seed for row in runs[arm]):
                team = ARMS[arm][1]
                start = recipe(environment, team, folder / f"{environment}{'-team' if team else ''}")
                runs[arm].append(run(environment, arm, start, seed, tokens))
                print(json.dumps({"environment": environment, "arm": arm, **runs[arm][-1]}), flush=True)
        written["environments"][environment] = {"tokens": tokens, "summary": summary(runs), "runs": runs}
        file.write(written)
        for arm, found in summary(runs).items():
            print(f"{environment:<16} {arm:<12}", json.dumps(found))


if __name__ == "__main__":
    main()
