"""Measure the AgentBench environments: steps per second in one thread and over gRPC, and memory of a session.

    python benchmarks/speed/environment_steps.py [--sessions 1000] [--tasks 200] [--rounds 5]
        [--json benchmarks/results/environment_steps.json]

Scripted experts play the tasks, whose generation is not counted. In process, seconds are CPU seconds of the thread.
Over gRPC, all sessions play at once on a ``mrlm serve`` of its own process on this machine; seconds are those of the
clock, from the first reset to the last reply, and the server's CPU seconds are measured too. Then sessions are opened
in process, each with the first two replies of its expert, and their memory is traced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "serving"))

from mrlm_environments import AlfWorldEnvironment, KnowledgeGraphEnvironment, WebShopEnvironment
from provenance import provenance
from remote_load import Server

from mrlm_pl.environment import Environment, Task
from mrlm_pl.episode import Message
from mrlm_pl.serving import RemoteEnvironment

ENVIRONMENTS = {
    "knowledge_graph": KnowledgeGraphEnvironment,
    "webshop": WebShopEnvironment,
    "alfworld": AlfWorldEnvironment,
}


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


async def play_remote(environment: Environment, played: list[tuple[Task, list[Message]]], count: int) -> float:
    """Play one episode in each of many concurrent sessions; return the steps per second, with the resets."""

    async def play(session: Any, task: Task, replies: list[Message]) -> int:
        await session.reset(task)
        for reply in replies:
            last = await session.step({"agent": reply})
        assert last.success, task
        session.close()
        return len(replies)

    began = time.perf_counter()
    steps = await asyncio.gather(*(play(environment.copy(), *played[n % len(played)]) for n in range(count)))
    return sum(steps) / (time.perf_counter() - began)


def served(name: str, played: list[tuple[Task, list[Message]]], count: int, rounds: int) -> dict[str, float]:
    """Return the steps per second over gRPC, and the server's CPU milliseconds of a step."""
    server = Server("--environments", name)
    try:
        environment = RemoteEnvironment(server.target, name)
        asyncio.run(play_remote(environment, played, count))  # graphs and stems are made once
        before = server.cpu_seconds()
        rates = [asyncio.run(play_remote(environment, played, count)) for _ in range(rounds)]
        steps = rounds * sum(len(played[n % len(played)][1]) for n in range(count))
        cpu = 1000 * (server.cpu_seconds() - before) / steps
    finally:
        server.stop()
    return {"lowest": min(rates), "highest": max(rates), "server_cpu_ms": cpu}


def session_bytes(environment: Environment, played: list[tuple[Task, list[Message]]], count: int) -> float:
    """Return the memory of one of many open sessions."""
    open_sessions = []
    tracemalloc.start()
    for number in range(count):
        task, replies = played[number % len(played)]
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
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, kind in ENVIRONMENTS.items():
        environment = kind()
        played = experts(environment, options.tasks)
        steps_per_second(environment, played)  # graphs and stems are made once
        rates = [steps_per_second(environment, played) for _ in range(options.rounds)]
        found[name] = {
            "steps_per_cpu_second": {"lowest": min(rates), "highest": max(rates)},
            "grpc_steps_per_second": served(name, played, options.sessions, options.rounds),
            "bytes_per_session": session_bytes(environment, played, options.sessions),
        }
        print(name, json.dumps(found[name]))
    if options.json:
        summary = {**provenance(), "sessions": options.sessions, "tasks": options.tasks, "environments": found}
        options.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
