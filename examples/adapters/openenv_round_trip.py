"""Serve the math environment to OpenEnv's clients, and play on it with our client of OpenEnv servers.

python examples/adapters/openenv_round_trip.py
"""

import asyncio

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment, OpenEnvEnvironment

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import Message
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.openenv import OpenEnvServer
from mrlm_pl.serving.server import EnvironmentServer


async def serve() -> tuple[EnvironmentServer, OpenEnvServer]:
    """Start the servers, as `mrlm serve --environments math --openenv_port 0` does."""
    server = EnvironmentServer(Offer({"math": lambda settings: MathEnvironment((1, 1))}, 0, 60.0))
    await server.start()
    openenv = OpenEnvServer(server, 0)
    await openenv.start()
    return server, openenv


async def play(url: str) -> list[float]:
    """Return the rewards of a right and a wrong answer to the same question."""
    environment = OpenEnvEnvironment(url)
    task, rewards = environment.tasks("train")[0], []
    answers = MathEnvironment((1, 1)).tasks("train")[task.data["seed"]].data
    for reply in (answers["answer"], "-1"):
        shown = await environment.reset(task)
        step = await environment.step({"agent": Message("assistant", reply)})
        print(shown["agent"][0].content, reply, step.rewards)
        rewards.append(step.rewards["agent"])
    environment.close()
    return rewards


def main() -> list[float]:
    """Serve and play."""
    loop = EventLoopThread()
    server, openenv = loop.submit(serve()).result(60)
    try:
        return asyncio.run(play(f"http://127.0.0.1:{openenv.port}"))
    finally:
        loop.submit(openenv.stop()).result(60)
        loop.submit(server.stop()).result(60)
        loop.close()


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
