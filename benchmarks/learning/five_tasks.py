"""Train one tiny policy on AgentBench's five tasks: rewards of each over the run, and AgentRL's ablation.

    python benchmarks/learning/five_tasks.py [--task-normalization none scale_only paper] [--cross-policy-share 0 0.25]
        [--seeds 0] [--json out.json] [-- OPTIONS]

The recipe (configs/recipes/tiny_agentbench.yaml) runs once, unless ``--policy`` names its result; then
configs/tasks/agentbench/five_tasks.yaml runs from its policy for every combination of the flags and seeds. Printed for
each run and task: played groups against the weights, and the mean reward in the first and the last fifth of the
iterations, with 95 % intervals over groups. Failed episodes are excluded. Runs that ``--json`` holds already are not
repeated. OPTIONS go to ``mrlm train``.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from seeds import MRLM, ResultsFile, call, parser_of

from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.evaluation.intervals import mean_interval

CONFIG = Path("configs/tasks/agentbench/five_tasks.yaml")
TASKS = ("shell", "sql", "knowledge_graph", "webshop", "alfworld")
EPISODES = 1000
"""Demonstrations of each task."""
FLAGS = {
    "task_normalization": ("--model.task_normalization", "scale_only"),
    "cross_policy_share": ("--data.cross_policy.share", "0"),  # 0 is a run without snapshots
}
"""Options of this command, each with the setting that it varies and its default. All combinations run."""


def train(config: Path | str, folder: Path, *options: str) -> None:
    """Run ``mrlm train``."""
    call(MRLM, "train", "--config", str(config), "--output", str(folder), *options)


def recipe(folder: Path) -> Path:
    """Return the recipe's policy."""
    script = "examples/tiny_model/make_agentbench_demonstrations.py"
    call(sys.executable, script, "--output", str(folder), "--episodes", str(EPISODES))
    data = ("--model.policies.main.model", str(folder / "untrained"), "--data.train", str(folder / "rows.jsonl"))
    train("configs/recipes/tiny_agentbench.yaml", folder / "recipe", *data)
    return folder / "recipe/policies/main"


def measured(folder: Path) -> dict[str, Any]:
    """Return counts and reward curves of a run, by task."""
    data = yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]
    weights = data["weights"] or [1] * len(TASKS)
    shares = {name: weight / sum(weights) for name, weight in zip(TASKS, weights, strict=True)}
    groups: dict[str, dict[int, dict[str, list[Episode]]]] = {name: defaultdict(dict) for name in TASKS}
    failed = dict.fromkeys(TASKS, 0)
    for episode in read_episodes(folder / "episodes"):
        name = episode.task.environment
        failed[name] += episode.failed
        groups[name][episode.iteration].setdefault(episode.group, [])
        if not episode.failed:
            groups[name][episode.iteration][episode.group].append(episode)
    iterations = 1 + max(iteration for of_task in groups.values() for iteration in of_task)
    total = iterations * data["groups"]
    fifth = max(1, round(iterations / 5))
    parts = {"first": range(fifth), "last": range(iterations - fifth, iterations)}
    found: dict[str, Any] = {"iterations": iterations, "tasks": {}}
    for name in TASKS:
        count = sum(map(len, groups[name].values()))
        row: dict[str, Any] = {"groups": count, "due": round(total * shares[name], 2), "failed": failed[name]}
        for part, chosen in parts.items():
            row[part] = reward([group for n in chosen for group in groups[name].get(n, {}).values() if group])
        row["rises"] = bool(row["last"]["ci95"][0] > row["first"]["ci95"][1])
        row["curve"] = [
            reward([group for n in block for group in groups[name].get(n, {}).values() if group])["mean"]
            for block in blocks(iterations)
        ]
        found["tasks"][name] = row
    found["counts_within_1"] = all(abs(row["groups"] - row["due"]) <= 1 for row in found["tasks"].values())
    return found


def blocks(iterations: int) -> list[range]:
    """Return the iterations in at most ten parts."""
    parts = min(10, iterations)
    bounds = [round(part * iterations / parts) for part in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def reward(groups: list[list[Episode]]) -> dict[str, Any]:
    """Return the mean reward with its interval, and the success rate."""
    rewards = [[episode.reward for episode in group] for group in groups]
    flat = [value for group in rewards for value in group]
    if not flat:
        return {"mean": math.nan, "ci95": [math.nan, math.nan], "success": math.nan}
    wins = [bool(episode.success) for group in groups for episode in group]
    low, high = mean_interval(rewards)
    return {
        "mean": round(math.fsum(flat) / len(flat), 3),
        "ci95": [round(low, 3), round(high, 3)],
        "success": round(sum(wins) / len(wins), 3),
    }


def table(row: dict[str, Any]) -> str:
    """Return the figures of a run as text."""
    head = f"{', '.join(f'{name} {row[name]}' for name in (*FLAGS, 'seed'))}: {row['iterations']} iterations, "
    lines = [head + f"{row['wall_s']:.0f} s; counts within 1 of the weights: {row['counts_within_1']}"]
    for name, task in row["tasks"].items():
        first, last = task["first"], task["last"]
        lines.append(
            f"  {name:<15} groups {task['groups']:>4} of {task['due']:>6}  failed {task['failed']:>3}  "
            f"reward {first['mean']:.3f} [{first['ci95'][0]:.3f}, {first['ci95'][1]:.3f}] -> "
            f"{last['mean']:.3f} [{last['ci95'][0]:.3f}, {last['ci95'][1]:.3f}]  "
            f"success {first['success']:.2f} -> {last['success']:.2f}  {'rises' if task['rises'] else '-'}  "
            + " ".join(f"{value:.2f}" for value in task["curve"])
        )
    return "\n".join(lines)


def main() -> None:
    """Run every combination and print its table."""
    parser = parser_of(__doc__, seeds=1)
    for name, (_, default) in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", default=[default])
    parser.add_argument("--policy", type=Path, help="the recipe's result; default: run the recipe")
    parser.add_argument("--folder", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("overrides", nargs="*", help="options of mrlm train, after --")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    file = ResultsFile(options.json)
    rows: list[dict[str, Any]] = file.kept.get("runs", [])
    written = file.begun(runs=rows)
    for *values, seed in itertools.product(*(getattr(options, name) for name in FLAGS), options.seeds):
        chosen = {**dict(zip(FLAGS, values, strict=True)), "seed": seed}
        if any(chosen.items() <= row.items() for row in rows):
            continue
        options.policy = options.policy or recipe(folder)
        settings = [word for name, (flag, _) in FLAGS.items() for word in (flag, chosen[name])]
        settings += ["--model.policies.main.model", str(options.policy), "--seed_everything", str(seed)]
        place = folder / "-".join([*values, f"seed-{seed}"])
        started = time.perf_counter()
        train(CONFIG, place, *settings, *options.overrides)
        rows.append({**chosen, "wall_s": round(time.perf_counter() - started, 1), **measured(place)})
        print(table(rows[-1]), flush=True)
        file.write(written)


if __name__ == "__main__":
    main()
