"""Measure latency, memory and speed of ``mrlm serve`` with many sessions.

    python benchmarks/speed/serving/remote_load.py [--sessions 100 1000 10000] [--seconds 60] [--parts paced speed]
        [--workers 0]

For each number of sessions a new server hosts an environment that only counts, stepped either on the server's event
loop or on threads. ``paced`` steps the sessions at a fixed rate, and measures latency from the scheduled time of each
step. Every answer must echo its session and turn and hold the session's count, one step in a hundred is sent twice and
must get equal answers, and no session may remain at the end. ``speed`` makes as many steps as possible, with 256
concurrent requests. Exit status 1 if an answer is wrong. Client and server share this machine, so CPU seconds are
printed too.

With ``--workers N`` the sessions are opened at a controller, which places them on N workers; the client then connects
to the workers. A server's figures are sums over the workers, and ``per_worker`` is the sessions of each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step
from mrlm_pl.episode import Message, Task
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.codec import step_from, to_json
from mrlm_pl.serving.transport.connection import Address, Connection, StatusError

__all__ = ["CounterEnvironment", "ThreadedCounter"]  # this file is a plugin of the servers that it starts

TIMEOUT = 60.0
ASKED_TWICE = 100
IN_FLIGHT = 256


class CounterEnvironment(Environment):
    """Answer with the numbers of the task and the turn, without end."""

    name = "counter"
    quick = True

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        self.number, self.turn = task.index, 0
        return self._tell()

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.turn += 1
        return Step(self._tell(), rewards={"agent": float(self.turn)}, metrics={"turn": float(self.turn)})

    def _tell(self) -> Observations:
        return {"agent": (Message("user", f"{self.number} {self.turn}"),)}


class ThreadedCounter(CounterEnvironment):
    """The same environment, called on a thread like most environments."""

    name = "threaded"
    quick = False


class Server:
    """A process of ``mrlm serve`` with its figures.

    Args:
        options: options of the command.
    """

    def __init__(self, *options: str) -> None:
        folder = Path(tempfile.mkdtemp())
        plugin = folder / "mrlm_benchmark-0.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: mrlm-benchmark\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text("[mrlm_pl.plugins]\nenvironments_benchmark = remote_load\n")
        path = os.pathsep.join([str(folder), str(Path(__file__).parent), *sys.path[1:]])
        command = [sys.executable, "-m", "mrlm_pl.cli.main", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
        )
        assert self.process.stdout is not None
        self.target = self.process.stdout.readline().rpartition(" ")[2].strip()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        """Return the resident memory of the process, in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self) -> None:
        """Stop the process."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Fleet:
    """A server, or a controller with its workers.

    Args:
        environments: names, separated by commas.
        workers: number of workers; 0 is one server without a controller.
    """

    def __init__(self, environments: str, workers: int) -> None:
        self.controller = Server("--controller", "true") if workers else None
        joined = ["--join", self.controller.target] if self.controller else []
        self.servers = [Server("--environments", environments, *joined) for _ in range(max(workers, 1))]
        self.target = (self.controller or self.servers[0]).target

    async def complete(self) -> None:
        """Wait until every worker has connected."""
        stub = environment_pb2_grpc.ControllerServiceStub
        while self.controller is not None:
            async with grpc.aio.insecure_channel(self.target) as channel:
                reply = await stub(channel).ListWorkers(pb.ListWorkersRequest(), timeout=TIMEOUT)
            if len(reply.workers) == len(self.servers):
                return
            await asyncio.sleep(0.1)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the servers and the controller."""
        return sum(server.cpu_seconds() for server in (*self.servers, *filter(None, [self.controller])))

    def resident_mb(self) -> float:
        """Return the resident memory of the servers, in MiB."""
        return sum(server.resident_mb() for server in self.servers)

    def stop(self) -> None:
        """Stop the processes, workers first."""
        for server in (*self.servers, *filter(None, [self.controller])):
            server.stop()


class Session:
    """A session of the client."""

    def __init__(self, number: int, opened: pb.OpenReply, connection: Connection) -> None:
        self.number, self.id, self.turn, self.connection = number, opened.session, 0, connection
        self.lock = asyncio.Lock()

    def request(self) -> pb.StepRequest:
        """Return the request of the next step."""
        actions = to_json({"agent": Message("assistant", "count")})
        return pb.StepRequest(session=self.id, turn=self.turn, actions=actions)

    def take(self, reply: pb.StepReply) -> str | None:
        """Count the next step as made, and return the fault of its answer, or None."""
        step, turn = step_from(reply.step), self.turn
        self.turn += 1
        if (reply.session, reply.turn) != (self.id, turn):
            return "misrouted"
        if step.observations["agent"][0].content != f"{self.number} {turn + 1}":
            return "lost or repeated"
        return None if step.rewards == {"agent": turn + 1.0} else "wrong reward"


class Client:
    """All sessions, over one connection to each server.

    Args:
        connection: connection to the server that opens the sessions.
        environment: the sessions' environment.
    """

    def __init__(self, connection: Connection, environment: str) -> None:
        self.connection, self.environment = connection, environment
        self.sessions: list[Session] = []
        self.workers: dict[str, Connection] = {}
        self.wrong: Counter[str] = Counter()

    async def open(self, count: int) -> None:
        """Open a number of sessions, 256 at a time."""
        gate = asyncio.Semaphore(256)

        async def one(number: int) -> Session:
            request = pb.OpenRequest(
                environment=self.environment,
                task=to_json(Task(self.environment, "train", number, number, {})),
                client="benchmark",
                key=secrets.token_urlsafe(16),
            )
            async with gate:
                reply = await self.connection.call("Open", request, TIMEOUT)
            if reply.direct and reply.direct not in self.workers:
                self.workers[reply.direct] = Connection(Address(reply.direct))
            connection = self.workers[reply.direct] if reply.direct else self.connection
            connection.hold(reply.session, reply.lease_seconds)
            return Session(number, reply, connection)

        self.sessions = list(await asyncio.gather(*(one(number) for number in range(count))))

    async def close(self) -> int:
        """Close all sessions, and return the number that the server still has."""
        gate = asyncio.Semaphore(256)

        async def one(session: Session) -> None:
            session.connection.leases.pop(session.id, None)
            async with gate:
                await session.connection.call("Close", pb.CloseRequest(session=session.id), TIMEOUT)

        await asyncio.gather(*(one(session) for session in self.sessions))
        left = await self.connection.call("ListSessions", pb.ListSessionsRequest(limit=1), TIMEOUT)
        return left.total

    def take(self, session: Session, reply: pb.StepReply) -> None:
        """Check an answer."""
        problem = session.take(reply)
        if problem is not None:
            self.wrong[problem] += 1

    async def step(self, session: Session) -> None:
        """Make one step; one request in a hundred is sent twice."""
        request = session.request()
        asked = 2 if random.random() < 1 / ASKED_TWICE else 1
        calls = (session.connection.call("Step", request, TIMEOUT) for _ in range(asked))
        try:
            reply, *again = await asyncio.gather(*calls) if asked > 1 else [await next(calls)]
        except StatusError as error:
            self.wrong[str(error)[:200]] += 1
            return
        self.take(session, reply)
        if any(other != reply for other in again):
            self.wrong["two different answers"] += 1


@asynccontextmanager
async def connected(environment: str, count: int, workers: int) -> AsyncIterator[tuple[Fleet, Client, dict[str, Any]]]:
    """Start servers, open the sessions, and yield client and figures; remaining sessions count as wrong."""
    server = Fleet(environment, workers)
    client = Client(Connection(Address(server.target)), environment)
    try:
        await server.complete()
        await client.open(1)  # allocates the memory that every connection needs
        await client.close()
        before, started = server.resident_mb(), time.perf_counter()
        await client.open(count)
        opening = time.perf_counter() - started
        row: dict[str, Any] = {
            "environment": environment,
            "sessions": count,
            "open_per_second": round(count / opening),
            "server_mb_before": round(before, 1),
            "server_kb_per_session": round((server.resident_mb() - before) * 1024 / count, 2),
        }
        if workers:
            row["per_worker"] = list(Counter(session.connection.address.target for session in client.sessions).values())
        yield server, client, row
        row["server_mb_after"] = round(server.resident_mb(), 1)
        started = time.perf_counter()
        row["left"] = await client.close()
        row["close_per_second"] = round(count / (time.perf_counter() - started))
        if row["left"]:
            client.wrong["sessions left"] += row["left"]
        row["wrong"] = dict(client.wrong)
        for connection in (client.connection, *client.workers.values()):
            await connection.close()
    finally:
        server.stop()


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def paced(environment: str, count: int, rate: float, seconds: float, workers: int) -> dict[str, Any]:
    """Return latencies at a given rate."""
    async with connected(environment, count, workers) as (server, client, row):
        loop, latencies = asyncio.get_running_loop(), list[float]()

        async def one(session: Session, due: float) -> None:
            async with session.lock:  # wait for a busy session
                await client.step(session)
            latencies.append(loop.time() - due)

        order = list(client.sessions)
        random.Random(0).shuffle(order)
        turns, running = itertools.cycle(order), set[asyncio.Task[None]]()
        server_cpu, own_cpu, started = server.cpu_seconds(), own_cpu_seconds(), loop.time()
        total = int(rate * seconds)
        for number in range(total):
            due = started + number / rate
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            task = asyncio.ensure_future(one(next(turns), due))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        elapsed = loop.time() - started
        latencies.sort()
        row |= {
            "steps": len(latencies),
            "steps_per_second": round(total / elapsed),
            "p50_ms": round(1000 * latencies[total // 2], 2),
            "p99_ms": round(1000 * latencies[int(0.99 * total)], 2),
            "max_ms": round(1000 * latencies[-1], 1),
            "server_cpu_share": round((server.cpu_seconds() - server_cpu) / elapsed, 3),
            "client_cpu_share": round((own_cpu_seconds() - own_cpu) / elapsed, 3),
        }
        if sum(session.turn for session in client.sessions) != total:
            client.wrong["steps missing"] += 1
    return row


async def speed(environment: str, count: int, seconds: float, repeats: int, workers: int) -> dict[str, Any]:
    """Return steps per second and the server's CPU microseconds per step, medians over the repetitions."""
    async with connected(environment, count, workers) as (server, client, row):
        found: list[tuple[float, float]] = []
        for _ in range(repeats):
            made, cpu = sum(session.turn for session in client.sessions), server.cpu_seconds()
            elapsed = await flat_out(client.step, client.sessions, IN_FLIGHT, seconds)
            made = sum(session.turn for session in client.sessions) - made
            found.append((made / elapsed, 1e6 * (server.cpu_seconds() - cpu) / made))
        row["steps_per_second"] = round(statistics.median(pair[0] for pair in found))
        row["server_cpu_us"] = round(statistics.median(pair[1] for pair in found))
    return row


async def flat_out(
    call: Callable[[Any], Awaitable[None]], items: Sequence[Any], in_flight: int, seconds: float
) -> float:
    """Call with each item in turn, with bounded concurrency, for some seconds; return the seconds taken."""
    started = time.perf_counter()

    async def work(mine: Sequence[Any]) -> None:
        for item in itertools.cycle(mine):
            if time.perf_counter() - started > seconds:
                return
            await call(item)

    in_flight = min(in_flight, len(items))
    await asyncio.gather(*(work(items[place::in_flight]) for place in range(in_flight)))
    return time.perf_counter() - started


def main() -> None:
    """Run the command line's measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument(
        "--environments", nargs="+", default=["counter", "threaded"], help="stepped on the loop or on threads"
    )
    parser.add_argument("--parts", nargs="+", choices=("paced", "speed"), default=["paced", "speed"])
    parser.add_argument("--rate", type=float, default=1000.0, help="total steps per second of paced")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of paced")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of speed")
    parser.add_argument("--speed-seconds", type=float, default=3.0, help="seconds per repetition of speed")
    parser.add_argument("--workers", type=int, default=0, help="workers behind a controller; 0: one server")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    gc.freeze()  # keeps the client's own pauses small
    gc.set_threshold(20_000, 20)
    rows = []
    for part, environment, count in itertools.product(arguments.parts, arguments.environments, arguments.sessions):
        if part == "paced":
            row = asyncio.run(paced(environment, count, arguments.rate, arguments.seconds, arguments.workers))
        else:
            row = asyncio.run(speed(environment, count, arguments.speed_seconds, arguments.repeats, arguments.workers))
        rows.append({"part": part, **row})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2))
    if any(row["wrong"] for row in rows):
        raise SystemExit("an answer was wrong")


if __name__ == "__main__":
    main()
