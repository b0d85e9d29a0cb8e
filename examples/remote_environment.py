"""Start an environment server, play concurrent episodes on it, and stop it.

python examples/remote_environment.py
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from jsonargparse import auto_cli

from mrlm_pl.episode import Message, Task
from mrlm_pl.serving import RemoteEnvironment


async def play(template: RemoteEnvironment, task: Task, reply: str) -> float:
    """Return the reward of an episode with one reply."""
    environment = template.copy()  # each copy has its own session
    await environment.reset(task)
    step = await environment.step({"agent": Message("assistant", reply)})
    environment.close()
    return step.rewards["agent"]


async def play_all(template: RemoteEnvironment, tasks: list[Task]) -> list[float]:
    """Return the rewards of all tasks, played concurrently; every second answer is wrong."""
    replies = ["-98765" if number % 2 else str(task.data["answer"]) for number, task in enumerate(tasks)]
    return await asyncio.gather(*(play(template, task, reply) for task, reply in zip(tasks, replies, strict=True)))


def main(episodes: int = 10) -> list[float]:
    """Return the rewards of some episodes."""
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "serve", "--environments", "math", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]  # serving on HOST:PORT
            template = RemoteEnvironment(address, "math")
            source = template.tasks("train")
            rewards = asyncio.run(play_all(template, [source[index] for index in range(episodes)]))
        finally:
            server.terminate()
    print(f"rewards: {rewards}")
    return rewards


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
