"""Write demonstrations of a hurried planner and executor in a grid for the built-in tiny model.

    python examples/tiny_model/make_path_demonstrations.py --output runs/tiny-path.jsonl

The team plays ``PlanPath`` on grids of the training split. A reply is a shortest path's moves from where the team is,
or as often random moves. A row is one agent's conversation. So the trained model knows the form of a reply and goes the
right way more often than not, and its errors add up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from mrlm_environments.games.plan_path import MOVES, PlanPath

from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

HURRY = 0.5
"""Fraction of random replies."""

FIRST = 1_000_000
"""Index of the first task, far from those of a run."""


def demonstrations(environment: PlanPath, task: Task, rng: Random) -> Iterator[dict[str, Any]]:
    """Yield the conversation of each agent in an episode, rows for ``TrajectoryDataModule``."""
    seen: dict[str, list[Message]] = {agent: [] for agent in environment.agents}
    observations = environment.reset(task)
    while observations:
        ((agent, messages),) = observations.items()
        grid = next(word for word in messages[-1].content.split() if "/" in word)
        reply = environment.gold(replace(task, data={"grid": grid}))[agent][0]
        if rng.random() < HURRY:
            reply = "".join(rng.choices([*MOVES], k=environment.moves))
        seen[agent] += [*messages, Message("assistant", reply)]
        observations = environment.step({agent: seen[agent][-1]}).observations
    for conversation in seen.values():
        yield {"messages": [message.to_chat() for message in conversation]}


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--episodes", type=int, default=6_000)
    parser.add_argument("--settings", type=json.loads, default={}, help="arguments of PlanPath, as JSON")
    options = parser.parse_args()
    environment = PlanPath(**options.settings)
    tasks = environment.tasks("train")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for index in range(options.episodes):
            for row in demonstrations(environment, tasks[FIRST + index], keyed_random("path demonstration", index)):
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
