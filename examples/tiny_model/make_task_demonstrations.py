"""Write demonstrations of code or of calculator calls for the built-in tiny model.

    python examples/tiny_model/make_task_demonstrations.py --environment code --output runs/tiny-code.jsonl
    python examples/tiny_model/make_task_demonstrations.py --environment tools --output runs/tiny-tools.jsonl

Careful rows solve a task of the training split with the best replies (`Environment.gold`), played in the environment so
that the chat contains the tool results; its ``tools`` has their schemas. The other rows are hurried: they give the
right expression, but neither as a function nor to the calculator. So the trained model can solve the tasks, and solves
a third to half of them: the gap that reinforcement learning closes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.tools.environment import ToolEnvironment

from mrlm_pl.environment import SingleAgentEnvironment, Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

CAREFUL = {"code": 0.4, "tools": 0.6}
"""Fraction of careful rows."""

ROWS = {"code": 10_000, "tools": 16_000}


def make_environment(name: str) -> SingleAgentEnvironment:
    """Return the environment of ``configs/tasks/NAME.yaml``, for ``code`` or ``tools``."""
    if name == "code":
        return CodeEnvironment(kinds=["number"], difficulty=(1, 2))
    return ToolEnvironment(tools=["calculator"], max_turns=3)


def hurried_reply(task: Task) -> str:
    """Return the task's bare expression."""
    if task.environment == "code":
        return str(task.data["solution"]).partition("return ")[2]
    return f"<answer>{task.data['question'].removesuffix('=?')}</answer>"


def demonstration(environment: SingleAgentEnvironment, task: Task, careful: bool) -> dict[str, Any]:
    """Return the chat of an episode with the best or a hurried reply, a row for ``TrajectoryDataModule``."""
    agent = environment.agents[0]
    best = environment.gold(task)
    assert best is not None, "generated tasks know their best replies"
    replies = best[agent] if careful else [hurried_reply(task)]
    messages = list(environment.reset(task)[agent])
    for number, text in enumerate(replies, start=1):
        reply = Message("assistant", text)
        messages.append(reply)
        if number < len(replies):  # the last reply ends the episode; its grade is not needed
            messages += environment.step({agent: reply}).observations[agent]
    row: dict[str, Any] = {"messages": [message.to_chat() for message in messages]}
    schemas = [schema.to_chat() for schema in environment.tools(agent)]
    return row | ({"tools": schemas} if schemas else {})


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--environment", choices=("code", "tools"), required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--rows", type=int, default=None, help="default: 10,000 of code, 16,000 of tools")
    options = parser.parse_args()
    environment = make_environment(options.environment)
    tasks = environment.tasks("train")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for index in range(options.rows or ROWS[options.environment]):
            careful = keyed_random("demonstration", index).random() < CAREFUL[options.environment]
            file.write(json.dumps(demonstration(environment, tasks[index], careful)) + "\n")
    environment.close()


if __name__ == "__main__":
    main()
