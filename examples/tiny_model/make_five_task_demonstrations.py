"""Write demonstrations of AgentBench's five tasks for the built-in tiny model: shell, SQL, graph, shop and house.

    python examples/tiny_model/make_five_task_demonstrations.py --output runs/tiny-five.jsonl

As in make_task_demonstrations.py, careful rows solve a task of the training split with the best known replies, played
in the environment so that the chat contains the tool results. The other rows are hurried: they answer without looking,
and buy the first product. The environments are those of ``configs/tasks/five_tasks.yaml``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mrlm_environments.alfworld.environment import AlfWorldEnvironment
from mrlm_environments.knowledge_graph.environment import KnowledgeGraphEnvironment
from mrlm_environments.shell.environment import ShellEnvironment
from mrlm_environments.sql.environment import SqlEnvironment
from mrlm_environments.webshop.environment import WebShopEnvironment

from mrlm_pl.environment import Environment, Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "shell": lambda: ShellEnvironment(max_turns=2),
    "sql": lambda: SqlEnvironment(kinds=["select", "count", "delete"], rows=(3, 4), max_turns=3, instruction=""),
    "knowledge_graph": lambda: KnowledgeGraphEnvironment(
        kinds=["join", "count"], hops=(1, 1), max_turns=5, instruction=""
    ),
    "webshop": lambda: WebShopEnvironment(max_turns=4, page_size=2, list_actions=False, instruction=""),
    "alfworld": lambda: AlfWorldEnvironment(
        kinds=["pick"], steps=(1, 6), max_turns=8, list_actions=False, instruction=""
    ),
}
ROWS = {"shell": 5000, "sql": 6000, "knowledge_graph": 5000, "webshop": 4000, "alfworld": 5000}
CAREFUL = 0.5
"""Fraction of careful rows; the shop has fewer, since half of its purchases need more turns."""

Reply = str | Callable[[str], str]
"""A reply, or a function of the last message that returns it."""


def call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def careful_replies(environment: Environment, task: Task) -> Sequence[Reply]:
    """Return the best reply of each turn; empty if none are known."""
    if environment.name == "shell":
        # The environment's best replies know the answer; these look first.
        look = call("bash_action", script=task.data["reference"].removesuffix(" || true"))
        if task.data["description"].startswith("Write"):
            return [look, call("finish_action")]
        return [look, lambda output: call("answer_action", answer=output.strip())]
    return (environment.gold(task) or {}).get("agent", ())


def hurried_replies(name: str, task: Task) -> Sequence[Reply]:
    """Return replies without a look at the environment, which are rarely right; in the house they are the first two."""
    if name == "alfworld":
        goal = f"{task.data['destination']} 1"
        move = f"move {task.data['target']} 1 to {goal}"
        return [call("take_action", action=f"go to {goal}"), call("take_action", action=move)]
    if name == "webshop":
        return [
            call("search_action", keywords=" ".join(task.data["attributes"])),
            lambda page: call("click_action", value=re.findall(r"\bB0\w{8}\b", page)[0]),
            call("click_action", value="Buy Now"),
        ]
    if name == "knowledge_graph":
        return ["Final Answer: #0"]
    if name == "sql":
        return [call("commit_final_answer", answers=[])]
    writes = task.data["description"].startswith("Write")
    return [call("finish_action") if writes else call("answer_action", answer="0")]


def demonstration(environment: Environment, task: Task, careful: bool) -> dict[str, Any]:
    """Return the chat of an episode with careful replies if they are known, else with hurried ones."""
    agent = environment.agents[0]
    replies = careful_replies(environment, task) if careful else ()
    replies = replies or hurried_replies(environment.name, task)
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
        careful = keyed_random("demonstration", name, index).random() < CAREFUL
        yield demonstration(environment, tasks[index], careful)
    environment.close()


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description="Write demonstrations of five tasks for the tiny model.")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the 25,000 rows")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for name, rows in ROWS.items():
            for row in demonstrations(name, max(1, round(rows * options.share))):
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
