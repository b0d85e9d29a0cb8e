"""Write demonstrations of five tasks for the built-in tiny model: math, code, tools, SQL and shell.

    python examples/tiny_model/make_five_task_demonstrations.py --output runs/tiny-five.jsonl

As in make_task_demonstrations.py, careful rows solve a task of the training split with the best known replies, played
in the environment so that the chat contains the tool results. The other rows are hurried: they answer without
computing or looking. The environments are those of ``configs/tasks/five_tasks.yaml``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from make_demonstrations import estimate
from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.math.environment import MathEnvironment
from mrlm_environments.shell.environment import ShellEnvironment
from mrlm_environments.sql.environment import SqlEnvironment
from mrlm_environments.tools.environment import ToolEnvironment

from mrlm_pl.environment import SingleAgentEnvironment, Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

ENVIRONMENTS: dict[str, Callable[[], SingleAgentEnvironment]] = {
    "math": lambda: MathEnvironment(difficulty=(1, 1)),
    "code": lambda: CodeEnvironment(kinds=["number"], difficulty=(1, 2)),
    "tools": lambda: ToolEnvironment(tools=["calculator"], max_turns=3),
    "sql": lambda: SqlEnvironment(kinds=["select", "count", "delete"], rows=(3, 4), max_turns=3, instruction=""),
    "shell": lambda: ShellEnvironment(max_turns=3),
}
ROWS = {"math": 10_000, "code": 4000, "tools": 8000, "sql": 6000, "shell": 5000}
CAREFUL = {"math": 0.6, "code": 0.4, "tools": 0.6, "sql": 0.5, "shell": 0.5}
"""Fraction of careful rows. Math needs many of them, since the other tasks make the model forget arithmetic."""


def call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def careful_replies(environment: SingleAgentEnvironment, task: Task) -> list[str | Callable[[str], str]]:
    """Return the best reply of each turn, as a text or as a function of the last tool result."""
    if environment.name == "shell":
        # The environment's best replies know the answer; these look first.
        look = call("bash_action", script=task.data["reference"].removesuffix(" || true"))
        if task.data["description"].startswith("Write"):
            return [look, call("finish_action")]
        return [look, lambda output: call("answer_action", answer=output.strip())]
    best = environment.gold(task)
    assert best is not None, "generated tasks know their best replies"
    return list(best[environment.agents[0]])


def hurried_reply(name: str, task: Task) -> str:
    """Return a reply without computation, which is rarely right."""
    if name == "math":
        return estimate(int(task.data["answer"]))
    if name == "code":
        return str(task.data["solution"]).partition("return ")[2]
    if name == "tools":
        return f"<answer>{task.data['question'].removesuffix('=?')}</answer>"
    if name == "sql":
        return call("commit_final_answer", answers=[])
    writes = task.data["description"].startswith("Write")
    return call("finish_action") if writes else call("answer_action", answer="0")


def demonstration(environment: SingleAgentEnvironment, task: Task, careful: bool) -> dict[str, Any]:
    """Return the chat of an episode with careful or hurried replies, a row for ``TrajectoryDataModule``."""
    agent = environment.agents[0]
    replies = careful_replies(environment, task) if careful else [hurried_reply(environment.name, task)]
    messages = list(environment.reset(task)[agent])
    for number, reply in enumerate(replies, start=1):
        message = Message("assistant", reply if isinstance(reply, str) else reply(messages[-1].content))
        messages.append(message)
        if number < len(replies):  # the last reply ends the episode; its grade is not needed
            messages += environment.step({agent: message}).observations[agent]
    row: dict[str, Any] = {"messages": [message.to_chat() for message in messages]}
    schemas = [schema.to_chat() for schema in environment.tools(agent)]
    return row | ({"tools": schemas} if schemas else {})


def demonstrations(name: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yield ``rows`` rows of one environment, each of another task."""
    environment = ENVIRONMENTS[name]()
    tasks = environment.tasks("train")
    for index in range(rows):
        careful = keyed_random("demonstration", name, index).random() < CAREFUL[name]
        yield demonstration(environment, tasks[index], careful)
    environment.close()


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description="Write demonstrations of five tasks for the tiny model.")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the 33,000 rows")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for name, rows in ROWS.items():
            for row in demonstrations(name, max(1, round(rows * options.share))):
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
