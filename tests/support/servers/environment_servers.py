"""Servers and environments for the tests of remote environments."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import (
    DatasetTasks,
    Environment,
    Observations,
    Outcome,
    SingleAgentEnvironment,
    Step,
    ToolSchema,
)
from mrlm_pl.episode import Message, Task
from mrlm_pl.serving.cluster import SEPARATOR, Membership
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import Limits
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.codec import to_json
from mrlm_pl.serving.transport.connection import Address

ROOT = Path(__file__).parents[3]
TASK = Task("scripted", "train", 0, 2**64 + 1, {"flag": True, "one": 1, "share": 1.0, "large": 2**70})


class Scripted(SingleAgentEnvironment):
    """Act on the reply (``end``, ``hang``, ``until FILE``, ``raise``, ``exit``, ``big N``), and count all others."""

    name = "scripted"
    tools_offered = (ToolSchema("look", "Looks.", {"type": "object", "properties": {"deep": {"type": "boolean"}}}),)
    gate = threading.Event()
    steps: list[tuple[int, str]] = []  # noqa: RUF012 (shared by all instances on purpose)
    closed: list[int] = []  # noqa: RUF012
    made = 0
    era = 0

    def __init__(self, greeting: str = "task", size: int = 200) -> None:
        self.greeting, self.size = greeting, size
        self.of = Scripted.era  # instances of earlier tests leave the lists of this one alone
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
        if self.of == Scripted.era:
            self.steps.append((id(self), message.content))
        if word == "hang":
            self.gate.wait(100)
        elif word == "sleep":
            time.sleep(float(rest))
        elif word == "until":
            Path(f"{rest}-{os.getpid()}-{id(self)}").touch()  # the step is under way
            while not Path(rest).exists():
                time.sleep(0.01)
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
        if self.of == Scripted.era:
            self.closed.append(id(self))


class Duo(Environment):
    """Let two agents act simultaneously, three times; ``async``."""

    name = "duo"
    agents = ("left", "right")

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(4)])

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        self.left = 3
        return {agent: (Message("user", f"{agent} {task.index}"),) for agent in self.agents}

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        await asyncio.sleep(float(actions["left"].content or 0))
        self.left -= 1
        seen = {} if not self.left else {agent: (Message("user", "on"),) for agent in self.agents}
        return Step(seen, {"left": 0.5, "right": True}, done=not self.left, stop_reason="" if self.left else "end")


class Served:
    """A server on its own event loop, with a plain client."""

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
            fields["settings"] = to_json(fields["settings"])
        return self.stub.Open(pb.OpenRequest(environment=environment, task=to_json(task), **fields), timeout=60)

    def step(self, session: str, turn: int, *texts: str, timeout: float = 60, **by_agent: str) -> pb.StepReply:
        return self.stub.Step(step_request(session, turn, *texts, **by_agent), timeout=timeout)

    def run(self, coroutine: Any) -> Any:
        return self.loop.submit(coroutine).result(100)

    def stop(self) -> None:
        self.channel.close()
        self.run(self.server.stop())
        self.loop.close()


def step_request(session: str, turn: int, text: str = "go", **by_agent: str) -> pb.StepRequest:
    actions = {agent: Message("assistant", said) for agent, said in (by_agent or {"agent": text}).items()}
    return pb.StepRequest(session=session, turn=turn, actions=to_json(actions))


def offer(**options: Any) -> Offer:
    made = {"scripted": lambda settings: Scripted(**settings), "duo": lambda settings: Duo()}
    hosts = (options.pop("processes", 0), options.pop("step_seconds", 20.0))
    return Offer({**made, **options.pop("more", {})}, *hosts, options.pop("settings", {}))


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and the text of a rejected call."""
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **options)
    return error.value.code(), error.value.details()


def attempt(call: Any, *arguments: Any, **options: Any) -> grpc.StatusCode | None:
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        return error.code()
    return None


def played(environment: Environment, *texts: str, task: Task = TASK) -> Step:
    """Return the last step of an episode with these replies of ``agent``."""

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


def eventually(condition: Callable[[], Any], seconds: float = 100.0) -> Any:
    """Return the first true value of a condition; fail after a time limit."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.01)
    return value


class ServerProcess:
    """A server with these environments in its own process, which tests kill or stop.

    Args:
        port: port; 0 takes a free one.
        lease_seconds: lease of its sessions.
        arguments: another command, which prints ``serving on HOST:PORT``.
        join: address of its controller.
    """

    def __init__(
        self, port: int = 0, lease_seconds: float = 60.0, arguments: list[str] | None = None, join: str = ""
    ) -> None:
        command = arguments or ["-m", "tests.support.servers.environment_servers", str(port), str(lease_seconds), join]
        self.process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving on "), line
        self.target = line.split()[-1]
        self.port = int(self.target.rpartition(":")[2])

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(100)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Proxy:
    """Pass bytes between clients and a server, except on silenced connections."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port_behind = int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections: list[tuple[threading.Event, socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Silence the current connections without closing them."""
        for silent, _, _ in self.connections:
            silent.set()

    def cut(self) -> None:
        """Close the current connections."""
        for _, client, server in self.connections:
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                server = socket.create_connection((self.host, self.port_behind))
                silent = threading.Event()
                self.connections.append((silent, client, server))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(silent, source, sink), daemon=True).start()

    def _pass(self, silent: threading.Event, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not silent.is_set():
                    sink.sendall(data)
            if not silent.is_set():
                sink.shutdown(socket.SHUT_WR)


class Nonsense(environment_pb2_grpc.EnvironmentServiceServicer):
    """Answer an episode wrongly in one of several ways."""

    def __init__(self, way: str) -> None:
        self.way = way

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenReply:  # noqa: N802
        if self.way == "silence":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        said = {"agent": [Message("user", "Say 1")]}
        return pb.OpenReply(session="s", lease_seconds=60, observations=to_json(said), tools=to_json({}))

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepReply:  # noqa: N802
        if self.way == "session":
            return pb.StepReply(session="t", turn=request.turn)
        if self.way == "turn":
            return pb.StepReply(session="s", turn=9)
        if self.way == "code":
            await context.abort(grpc.StatusCode.UNKNOWN, "what")
        observations = {"agent": [{"role": "root", "content": ""}]} if self.way == "role" else []
        return pb.StepReply(session="s", step=to_json({"observations": observations}))

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseReply:  # noqa: N802
        return pb.CloseReply()

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Any) -> pb.KeepAliveReply:  # noqa: N802
        return pb.KeepAliveReply()


async def talk_nonsense(way: str) -> tuple[grpc.aio.Server, int]:
    """Return such a server and its port."""
    server = grpc.aio.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(Nonsense(way), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def _serve(port: int, lease_seconds: float, controller: str) -> None:
    limits = Limits(lease_seconds, 100.0)
    server = EnvironmentServer(offer(), Endpoint(port=port), limits)
    await server.start()
    if controller:
        server.service.sessions.prefix = f"worker{server.port}{SEPARATOR}"
        membership = Membership(server, Address(controller), f"127.0.0.1:{server.port}")
        joining = asyncio.ensure_future(membership.run())
    print(f"serving on 127.0.0.1:{server.port}", flush=True)
    await server.serve()
    if controller:
        joining.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
