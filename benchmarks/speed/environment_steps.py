"""Measure the AgentBench environments in one thread: steps per CPU second, and the memory of an open session.

    python benchmarks/speed/environment_steps.py [--sessions 1000] [--json benchmarks/results/environment_steps.json]

Scripted experts play 200 tasks, whose generation is not counted. CPU seconds are those of the thread. Then sessions of
100 tasks are opened, each with the first two replies of its expert, and their memory is traced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mrlm_environments import AlfWorldEnvironment, KnowledgeGraphEnvironment, WebShopEnvironment
from provenance import provenance

from mrlm_pl.environment import Environment, Task
from mrlm_pl.episode import Message

ENVIRONMENTS = {
    "knowledge_graph": KnowledgeGraphEnvironment,
    "webshop": WebShopEnvironment,
    "alfworld": AlfWorldEnvironment,
}
TASKS, OPENED, ROUNDS = 200, 100, 5


def experts(environment: Environment, count: int) -> list[tuple[Task, list[Message]]]:
    """Return tasks with the replies that solve them."""
    source = environment.tasks("train")
    found = [(source[number], environment.gold(source[number])) for number in range(count)]
    return [(task, [Message("assistant", reply) for reply in gold["agent"]]) for task, gold in found if gold]


def steps_per_second(environment: Environment, played: list[tuple[Task, list[Message]]]) -> float:
    """Return the steps of all episodes for each CPU second, with the resets."""
    began = time.thread_time()
    for task, replies in played:
        environment.reset(task)
        for reply in replies:
            last = environment.step({"agent": reply})
        assert last.success, task
    return sum(len(replies) for _, replies in played) / (time.thread_time() - began)


def session_bytes(environment: Environment, played: list[tuple[Task, list[Message]]], count: int) -> float:
    """Return the memory of one of many open sessions."""
    open_sessions = []
    tracemalloc.start()
    for number in range(count):
        task, replies = played[number % OPENED]
        session = environment.copy()
        session.reset(task)
        for reply in replies[:2]:
            session.step({"agent": reply})
        open_sessions.append(session)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / count


def main() -> None:
    """Measure and print; ``--json`` writes a file too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, kind in ENVIRONMENTS.items():
        environment = kind()
        played = experts(environment, TASKS)
        steps_per_second(environment, played)  # graphs and stems are made once
        rates = [steps_per_second(environment, played) for _ in range(ROUNDS)]
        found[name] = {
            "steps_per_cpu_second": {"lowest": min(rates), "highest": max(rates)},
            "bytes_per_session": session_bytes(environment, played, options.sessions),
        }
        print(name, json.dumps(found[name]))
    if options.json:
        summary = {**provenance(), "sessions": options.sessions, "environments": found}
        options.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
