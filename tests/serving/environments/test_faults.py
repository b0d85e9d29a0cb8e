"""Clients and servers when the other end dies, is silent or sends nonsense."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import RemoteError, RemoteTimeoutError
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments import client
from mrlm_pl.serving.environments.service import refusal_of
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.connection import RefusalError
from tests.support.servers.environment_servers import (
    TASK,
    Proxy,
    Scripted,
    Served,
    eventually,
    played,
    refusal,
    step_request,
    talk_nonsense,
)

Server = Callable[..., Served]
ROOT = Path(__file__).parents[3]


def remote(target: str, **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment(target, "scripted", **{"open_seconds": 60.0, "step_seconds": 90.0, **options})


def begun(environment: Environment) -> Any:
    made = environment.copy()
    asyncio.run(made.reset(TASK))  # type: ignore[arg-type]
    return made


def say(environment: Any, text: str = "go") -> Any:
    return asyncio.run(environment.step({"agent": Message("assistant", text)}))


def failure(environment: Any, text: str) -> tuple[Exception | None, float]:
    """Return the error of a step, and its time."""
    try:
        say(environment, text)
    except Exception as error:
        return error, time.monotonic()
    return None, time.monotonic()


def test_callers_are_told_at_once_that_a_server_was_killed(process: Any, tmp_path: Path) -> None:
    server = process()
    waiting, idle = [begun(remote(server.target)) for _ in range(8)], begun(remote(server.target))
    with ThreadPoolExecutor(8) as pool:
        told = [pool.submit(failure, environment, f"until {tmp_path}/never") for environment in waiting]
        eventually(lambda: len(list(tmp_path.iterdir())) == 8)
        server.send(signal.SIGKILL)
        killed = time.monotonic()
        for future in told:
            error, moment = future.result(60)
            assert isinstance(error, RemoteError)
            assert "UNAVAILABLE" in str(error)
            assert moment - killed < 15, "not when no ping is answered"
    error, _ = failure(idle, "x")
    assert isinstance(error, RemoteError)
    again = process(server.port)
    assert say(begun(remote(again.target)), "end").done
    assert "never opened here" in str(failure(idle, "x")[0])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through the controller"])
@pytest.mark.long_after(1)
def test_callers_are_told_at_once_that_a_worker_was_killed(
    process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct: bool
) -> None:
    async def reaches(worker: Any, session: str) -> bool:
        return direct

    monkeypatch.setattr(client, "_reaches", reaches)
    controller = process(arguments=["-m", "mrlm_pl.cli.main", "serve", "--controller", "true", "--port", "0"])
    first, second = (process(join=controller.target) for _ in range(2))
    with grpc.insecure_channel(controller.target) as channel:
        stub = environment_pb2_grpc.ControllerServiceStub(channel)
        eventually(lambda: len(stub.ListWorkers(pb.ListWorkersRequest()).workers) == 2)
    environment = remote(controller.target)
    waiting = [begun(environment) for _ in range(8)]
    doomed = [playing._session.startswith(f"worker{first.port}.") for playing in waiting]
    assert 0 < sum(doomed) < 8
    with ThreadPoolExecutor(8) as pool:
        told = [pool.submit(failure, playing, f"until {tmp_path}/go") for playing in waiting]
        eventually(lambda: len(list(tmp_path.iterdir())) == 8)
        first.send(signal.SIGKILL)
        for future, lost in zip(told, doomed, strict=True):
            if lost:
                error, _ = future.result(60)
                assert isinstance(error, RemoteError)
                assert "UNAVAILABLE" in str(error)
        assert [future.done() for future in told] == doomed, "not when the step would have been over"
        (tmp_path / "go").touch()
        outcomes = [future.result(100) for future in told]
    assert [error is not None for error, _ in outcomes] == doomed, "those of that worker, and no other"
    more = [begun(environment) for _ in range(4)]
    assert all(say(playing, "end").done for playing in more)
    assert second.process.poll() is None


@pytest.mark.parametrize("seconds", [5.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_a_server_that_stood_still_goes_on(process: Any, seconds: float) -> None:
    server = process(lease_seconds=seconds / 2)  # which are over while it stands still
    playing = [begun(remote(server.target)) for _ in range(5)]
    for environment in playing:
        say(environment)
    server.send(signal.SIGSTOP)
    with ThreadPoolExecutor(5) as pool:
        steps = [pool.submit(say, environment) for environment in playing]
        time.sleep(seconds)
        assert not any(step.done() for step in steps)
        server.send(signal.SIGCONT)
        assert [step.result(100).rewards for step in steps] == [{"agent": 2.0}] * 5
    for environment in playing:
        environment.close()


CLIENT = """
import asyncio, sys
from mrlm_pl.episode import Task
from mrlm_pl.serving import RemoteEnvironment
template = RemoteEnvironment(sys.argv[1], "scripted")
kept = [template.copy() for _ in range(10)]
for environment in kept:
    asyncio.run(environment.reset(Task("scripted", "train", 0)))
print("open", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def test_the_places_of_a_client_that_was_killed_are_free_within_its_lease(
    serve: Server, clock: SimpleNamespace
) -> None:
    served = serve(lease_seconds=3.0)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, served.target, "wait"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "open\n"
    assert served.live == 10
    sessions = list(served.server.service.sessions.values())
    for _ in range(2):
        clock.now += 2.0
        eventually(lambda: all(session.touched == clock.now for session in sessions))
    assert served.live == 10, "it keeps its leases"
    client.kill()
    client.communicate()

    def are_free_after_another_lease() -> bool:
        clock.now += 3.0  # again, should the server read the client's last request only now
        return served.live == 0

    eventually(are_free_after_another_lease)
    eventually(lambda: len(Scripted.closed) == 10)


def test_a_client_that_ends_says_goodbye(serve: Server) -> None:
    served = serve(lease_seconds=60)
    subprocess.run([sys.executable, "-c", CLIENT, served.target, "end"], check=True, capture_output=True, timeout=300)
    assert served.server.service.sessions.opened_total == 10
    eventually(lambda: served.live == 0, 30)


def test_an_environment_that_hangs_costs_its_episode_alone(serve: Server) -> None:
    served = serve(threads=2)
    hanging, other = [begun(remote(served.target)) for _ in range(4)], begun(remote(served.target))
    patient = served.server.service.limits
    served.server.service.limits = replace(patient, step_seconds=1.0)
    with ThreadPoolExecutor(4) as pool:
        for error, _ in pool.map(lambda environment: failure(environment, "hang"), hanging):
            assert isinstance(error, TimeoutError)
            assert "turn 0: TimeoutError" in str(error) or "no answer within 1 s" in str(error)
    served.server.service.limits = patient
    assert say(other).rewards == {"agent": 1.0}
    assert "took longer than 1 s" in str(failure(hanging[0], "x")[0])
    assert served.server.workers.abandoned == 4
    Scripted.gate.set()
    eventually(lambda: served.server.workers.abandoned == 0)


def test_calls_beyond_those_at_once_are_repeated(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.serving.server.CALLS_AT_ONCE", 2)
    served: Served = serve()
    sessions = [served.open().session for _ in range(2)]
    playing = begun(remote(served.target))
    hanging = [served.stub.Step.future(step_request(session, 0, "hang"), timeout=100) for session in sessions]
    eventually(lambda: len(Scripted.steps) == 2)
    assert refusal(served.step, sessions[0], 0)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(say, playing)
        time.sleep(1.0)
        assert not waiting.done()
        Scripted.gate.set()
        assert waiting.result(60).rewards == {"agent": 1.0}
    assert [call.result().turn for call in hanging] == [0, 0]
    playing.close()


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("session", "answered turn 0 of session 't', not turn 0 of 's'"),
        ("turn", "answered turn 9 of session 's'"),
        ("kind", "malformed content .*Expected `object`, got `array`"),
        ("code", "UNKNOWN: .* what"),
        ("role", "enum value 'root'"),
        ("silence", "UNAVAILABLE: .* the connection broke"),
    ],
)
def test_a_server_that_answers_wrongly(way: str, text: str) -> None:
    loop = EventLoopThread()
    server, port = loop.submit(talk_nonsense(way)).result(100)
    with pytest.raises(RemoteError, match=text):
        played(remote(f"127.0.0.1:{port}", open_seconds=1.0 if way == "silence" else 60.0), "go")
    loop.submit(server.stop(0)).result(100)
    loop.close()


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 200 OK\r\n\r\nhello", random.Random(0).randbytes(4000)])
def test_something_else_listens_on_the_port(greeting: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.sendall(greeting)
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(RemoteError, match="no server opened a session"):
        played(remote(f"127.0.0.1:{listener.getsockname()[1]}", open_seconds=0.5), "go")
    listener.close()


def test_a_connection_that_falls_silent_costs_the_deadline(served: Served) -> None:
    proxy = Proxy(served.target)
    environment = begun(remote(proxy.target))
    assert say(environment).rewards == {"agent": 1.0}
    environment.step_seconds = 3.0
    proxy.silence()
    with pytest.raises(RemoteTimeoutError, match="did not answer within 3 s"):
        say(environment)
    proxy.close()


def test_a_server_that_is_silent_is_late_at_a_reset_as_at_a_step(served: Served) -> None:
    proxy = Proxy(served.target)
    environment = begun(remote(proxy.target))
    environment.step_seconds, environment.open_seconds = 2.0, 1.0
    proxy.silence()
    for call in (lambda: say(environment), lambda: begun(environment)):
        with pytest.raises(TimeoutError, match=r"did not answer within 2 s") as raised:
            call()
        assert isinstance(raised.value, RemoteError)
    proxy.close()


def test_a_late_answer_of_a_server_behind_a_server_is_late() -> None:
    found = refusal_of(RemoteTimeoutError("the verifier was silent"))
    assert found.code is grpc.StatusCode.DEADLINE_EXCEEDED
    told = client._error_of(RefusalError(found.code, found.text), "environment 'x'")
    assert (type(told), str(told)) == (RemoteTimeoutError, "the verifier was silent")


def test_a_connection_that_is_cut_loses_and_repeats_nothing(served: Served) -> None:
    proxy = Proxy(served.target)
    playing = [begun(remote(proxy.target, step_seconds=60.0)) for _ in range(4)]
    for turn in range(3):
        with ThreadPoolExecutor(4) as pool:
            steps = [pool.submit(say, environment, "sleep 0.3") for environment in playing]
            time.sleep(0.1)
            proxy.cut()
            assert [step.result(60).rewards for step in steps] == [{"agent": 2.0 * turn + 1}] * 4
        for environment in playing:
            assert say(environment).rewards == {"agent": 2.0 * turn + 2}, "nothing goes into a connection that broke"
    assert len(Scripted.steps) == 24
    for environment in playing:
        environment.close()
    proxy.close()


@pytest.mark.slow
def test_a_connection_that_falls_silent_is_replaced(served: Served) -> None:
    proxy = Proxy(served.target)
    environment = begun(remote(proxy.target, step_seconds=90.0))
    assert say(environment).rewards == {"agent": 1.0}
    proxy.silence()
    started = time.monotonic()
    assert say(environment).rewards == {"agent": 2.0}, "and the turn was made once"
    assert time.monotonic() - started < 80, "pings detect the silence"
    environment.close()
    proxy.close()


def test_twice_the_load_that_a_server_bears(serve: Server) -> None:
    served = serve(threads=2, queue=8, sessions=12)  # 24 episodes at once, for 12 places and 10 calls
    environment = remote(served.target, open_seconds=60)

    def episode(number: int) -> float:
        step = played(environment.copy(), f"sleep 0.02 {number}"[:10], f"{number} b", "end")
        return step.rewards["agent"]

    with ThreadPoolExecutor(24) as pool:
        rewards = list(pool.map(episode, range(48)))
    assert rewards == [3.0] * 48
    assert max(Counter(text for _, text in Scripted.steps if " b" in text).values()) == 1
    eventually(lambda: served.live == 0)
