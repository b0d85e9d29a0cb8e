"""Write demonstrations of answers in later turns of a discussion for the built-in tiny model.

    python examples/tiny_model/make_reasoning_demonstrations.py --output runs/tiny-reasoning.jsonl

Two solvers play three turns of ``CollaborativeReasoningEnvironment`` on problems of the training split. Each answer is
independently a worked solution or, more often, an estimate rounded to tens. A row is one solver's conversation. So the
trained model can solve most problems in every turn, but solves about a third, regardless of the other's answers: the
data shows neither that solving is better nor that the other can be trusted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment

from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

WORKED = 0.35
"""Fraction of worked solutions."""

TURNS = 3


def estimate(answer: int) -> str:
    """Return the answer rounded to tens, in words.

    >>> estimate(17), estimate(4)
    ('about 20', 'about 0')
    """
    return f"about {(answer + 5) // 10 * 10}"


def demonstration(environment: CollaborativeReasoningEnvironment, task: Task, index: int) -> dict[str, Any]:
    """Return the conversation of ``solver_1`` in an episode, a row for ``TrajectoryDataModule``."""
    rng = keyed_random("reasoning demonstration", index)
    said = {True: task.data["solution"], False: estimate(int(task.data["answer"]))}
    observations = environment.reset(task)
    messages: list[Message] = []
    while observations:
        actions = {agent: Message("assistant", said[rng.random() < WORKED]) for agent in observations}
        messages += [*observations["solver_1"], actions["solver_1"]]
        observations = environment.step(actions).observations
    return {"messages": [message.to_chat() for message in messages]}


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--rows", type=int, default=8_000)
    options = parser.parse_args()
    environment = CollaborativeReasoningEnvironment(max_turns=TURNS)
    tasks = environment.tasks("train")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for index in range(options.rows):
            file.write(json.dumps(demonstration(environment, tasks[index], index)) + "\n")


if __name__ == "__main__":
    main()
