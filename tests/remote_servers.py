"""Servers and environments for the tests of remote environments."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from mrlm_pl.environment import (
    DatasetTasks,
    Environment,
    Observations,
    Outcome,
    SingleAgentEnvironment,
    Step,
    ToolSchema,
    TurnOrder,
)
from mrlm_pl.episode import Message, Task
from mrlm_pl.event_loop import EventLoopThread
from mrlm_pl.remote import environment_pb2 as pb
from mrlm_pl.remote import environment_pb2_grpc
from mrlm_pl.remote.codec import to_actions, to_map, to_task
from mrlm_pl.remote.hosted import Offer
from mrlm_pl.remote.server import EnvironmentServer

TASK = Task("scripted", "train", 0, 2**64 + 1, {"flag": True, "one": 1, "share": 1.0, "bytes": b"\x00\xff"})


class Scripted(SingleAgentEnvironment):
    """Does what the reply says: ``end``, ``hang``, ``raise``, ``exit``, ``big N``; anything else is counted."""

    name = "scripted"
    tools_offered = (ToolSchema("look", "Looks.", {"type": "object", "properties": {"deep": {"type": "boolean"}}}),)
    gate = threading.Event()
    steps: list[tuple[int, str]] = []  # noqa: RUF012 (shared by all instances on purpose)
    closed: list[int] = []  # noqa: RUF012
    made = 0

    def __init__(self, greeting: str = "task", size: int = 200) -> None:
        self.greeting, self.size = greeting, size
        type(self).made += 1

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n, "split": split} for n in range(self.size)])

    def tools(self, agent: str) -> tuple[ToolSchema, ...]:
        return self.tools_offered

    def begin(self, task: Task) -> str:
        if task.data.get("fail"):
            raise OSError("the back end is away")
        self.count = 0
        return f"{self.greeting} {task.data} {task.seed}"

    def reply(self, message: Message) -> Outcome:
        word, _, rest = message.content.partition(" ")
        self.steps.append((id(self), message.content))
        if word == "hang":
            self.gate.wait(30)
        elif word == "sleep":
            time.sleep(float(rest))
        elif word == "raise":
            raise OSError("the back end is away")
        elif word == "late":
            raise TimeoutError("a tool of mine was late")
        elif word == "exit":
            raise SystemExit(3)
        self.count += 1
        shown = "x" * int(rest) if word == "big" else f"{self.count} {message.content[:100]}"
        return Outcome({"count": float(self.count)}, None if word == "end" else shown, success=word == "end")

    def close(self) -> None:
        self.closed.append(id(self))


class Duo(Environment):
    """Two agents act at the same time, three times; ``async``."""

    name = "duo"
    agents = ("left", "right")

    def __init__(self) -> None:
        self.order = TurnOrder(self.name, self.agents)

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(4)])

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        self.left = 3
        observations = {agent: (Message("user", f"{agent} {task.index}"),) for agent in self.agents}
        self.order.began(observations)
        return observations

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        self.order.check_actions(actions)
        await asyncio.sleep(float(actions["left"].content or 0))
        self.left -= 1
        seen = {} if not self.left else {agent: (Message("user", "on"),) for agent in self.agents}
        step = Step(seen, {"left": 0.5, "right": True}, done=not self.left, stop_reason="" if self.left else "end")
        self.order.stepped(step)
        return step


class Served:
    """A server on an event loop of its own, with a plain client."""

    def __init__(self, server: EnvironmentServer, loop: EventLoopThread, channel: grpc.Channel | None = None) -> None:
        self.server, self.loop = server, loop
        self.target = f"127.0.0.1:{server.port}"
        size = [("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", 1 << 30)]
        self.channel = channel or grpc.insecure_channel(self.target, options=size)
        self.stub = environment_pb2_grpc.EnvironmentServiceStub(self.channel)

    @property
    def live(self) -> int:
        return len(self.server.service.sessions)

    def open(self, environment: str = "scripted", task: Task = TASK, **fields: Any) -> pb.OpenReply:
        fields = {"client": "test", **fields}
        if "settings" in fields:
            fields["settings"] = to_map(fields["settings"])
        return self.stub.Open(pb.OpenRequest(environment=environment, task=to_task(task), **fields), timeout=20)

    def step(self, session: str, turn: int, *texts: str, timeout: float = 20, **by_agent: str) -> pb.StepReply:
        return self.stub.Step(step_request(session, turn, *texts, **by_agent), timeout=timeout)

    def run(self, coroutine: Any) -> Any:
        return self.loop.submit(coroutine).result(30)

    def stop(self) -> None:
        self.channel.close()
        self.run(self.server.stop())
        self.loop.close()


def step_request(session: str, turn: int, text: str = "go", **by_agent: str) -> pb.StepRequest:
    actions = {agent: Message("assistant", said) for agent, said in (by_agent or {"agent": text}).items()}
    return pb.StepRequest(session=session, turn=turn, actions=to_actions(actions))


def offer(**options: Any) -> Offer:
    made = {"scripted": lambda settings: Scripted(**settings), "duo": lambda settings: Duo()}
    return Offer({**made, **options.pop("more", {})}, options.pop("processes", 0), options.pop("step_seconds", 20.0))


def played(environment: Environment, *texts: str, task: Task = TASK) -> Step:
    """The last step of an episode with these replies, of an agent named ``agent``."""

    async def play() -> Step:
        await _finished(environment.reset(task))
        for text in texts:
            step = await _finished(environment.step({"agent": Message("assistant", text)}))
        return step

    try:
        return asyncio.run(play())
    finally:
        environment.close()


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of a condition; fails if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
    return value
