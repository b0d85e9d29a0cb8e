"""Write demonstrations with which the built-in tiny model begins to write code or to call a calculator.

    python examples/tiny_model/make_task_demonstrations.py --environment code --output runs/tiny-code.jsonl
    python examples/tiny_model/make_task_demonstrations.py --environment tools --output runs/tiny-tools.jsonl

Careful rows reply to a task of the training split with what its environment knows to be best (`Environment.gold`). The
environment is played with these replies, so that a row is a whole chat: what the tools answered is in it, and their
schemas are in its ``tools``. The other rows are hurried: they have the right expression, but give it as it stands, and
neither as a function nor to the calculator. The trained model can therefore do the task, and does it a third to half of
the time: the gap that reinforcement learning closes.
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
"""Share of careful rows."""

ROWS = {"code": 10_000, "tools": 16_000}


def make_environment(name: str) -> SingleAgentEnvironment:
    """The environment of ``configs/tasks/NAME.yaml``, ``code`` or ``tools``."""
    if name == "code":
        return CodeEnvironment(kinds=["number"], difficulty=(1, 2))
    return ToolEnvironment(tools=["calculator"], max_turns=3)


def hurried_reply(task: Task) -> str:
    """The task's expression as it stands."""
    if task.environment == "code":
        return str(task.data["solution"]).partition("return ")[2]
    return f"<answer>{task.data['question'].removesuffix('=?')}</answer>"


def demonstration(environment: SingleAgentEnvironment, task: Task, careful: bool) -> dict[str, Any]:
    """A row for :class:`mrlm_pl.data.TrajectoryDataModule`: the chat of an episode with the best or a hurried reply."""
    agent = environment.agents[0]
    best = environment.gold(task)
    assert best is not None, "generated tasks know their best replies"
    replies = best[agent] if careful else [hurried_reply(task)]
    messages = list(environment.reset(task)[agent])
    for number, text in enumerate(replies, start=1):
        reply = Message("assistant", text)
        messages.append(reply)
        if number < len(replies):  # the last reply ends the episode, and nobody needs its grade
            messages += environment.step({agent: reply}).observations[agent]
    row: dict[str, Any] = {"messages": [message.to_chat() for message in messages]}
    schemas = [schema.to_chat() for schema in environment.tools(agent)]
    return row | ({"tools": schemas} if schemas else {})


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description="Write demonstrations of code or of tool calls for the tiny model.")
    parser.add_argument("--environment", choices=("code", "tools"), required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--rows", type=int, default=None, help="default is 10,000 of code, 16,000 of tools")
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
