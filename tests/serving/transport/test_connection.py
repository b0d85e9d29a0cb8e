"""A client's connection: refusals, faults of the network and leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from mrlm_pl.concurrency.backoff import until
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.connection import Address, Connection, RefusalError, StatusError, refuse

Code = grpc.StatusCode
Answer = Callable[[Any], Any]


class Faulty(environment_pb2_grpc.EnvironmentServiceServicer):
    """Answer ``KeepAlive`` with one fault after the other, then properly."""

    def __init__(self, faults: tuple[Answer, ...]) -> None:
        self.faults, self.asked = iter(faults), 0

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Any) -> pb.KeepAliveReply:  # noqa: N802
        self.asked += 1
        fault = next(self.faults, None)
        if fault is not None:
            await fault(context)
        return pb.KeepAliveReply()


def of_the_network(code: grpc.StatusCode, text: str = "") -> Answer:
    return lambda context: context.abort(code, text)


def of_the_service(code: grpc.StatusCode, text: str) -> Answer:
    return lambda context: refuse(context, code, text)


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    made = EventLoopThread()
    yield made
    made.close()


def asked(loop: EventLoopThread, *faults: Answer, use: Callable[[Connection], Any]) -> tuple[Any, int]:
    """Return what ``use`` makes of a connection to a server with these faults, and the number of calls."""

    async def run() -> tuple[Any, int]:
        service, server = Faulty(faults), grpc.aio.server()
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        connection = Connection(Address(f"127.0.0.1:{port}"))
        try:
            return await use(connection), service.asked
        finally:
            await connection.close()
            await server.stop(0)

    return loop.submit(run()).result(100)


async def keep_alive(connection: Connection) -> Any:
    """Return the reply, or the problem."""
    try:
        return await connection.call("KeepAlive", pb.KeepAliveRequest(), 60.0)
    except StatusError as error:
        return error


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("KeyError: '\udc80'", "KeyError: '?'"),
        ("\ud83d" * 5000, "?" * 2000),
        ("語" * 5000, "語" * 666),
        ("x" * 5000, "x" * 2000),
    ],
)
def test_any_text_of_a_refusal_arrives(loop: EventLoopThread, text: str, arrives: str) -> None:
    problem, calls = asked(loop, of_the_service(Code.ABORTED, text), use=keep_alive)
    assert (problem.code, problem.text, type(problem), calls) == (Code.ABORTED, arrives, RefusalError, 1)


TRANSIENT = [
    of_the_network(Code.UNKNOWN, "Stream removed"),
    of_the_network(Code.CANCELLED, "the proxy was restarted"),
    of_the_network(Code.RESOURCE_EXHAUSTED, "quota exceeded"),
    of_the_network(Code.ABORTED),
    of_the_network(Code.UNAVAILABLE),
    of_the_network(Code.INTERNAL),
]


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_of_the_network_is_repeated(loop: EventLoopThread, fault: Answer) -> None:
    reply, calls = asked(loop, fault, fault, use=keep_alive)
    assert (type(reply), calls) == (pb.KeepAliveReply, 3)


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"])
def test_a_status_that_a_repetition_does_not_change(loop: EventLoopThread, code: str) -> None:
    problem, calls = asked(loop, of_the_network(Code[code]), use=keep_alive)
    assert (problem.code, calls) == (Code[code], 1)


@pytest.mark.parametrize("code", ["UNKNOWN", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_a_refusal_is_not_repeated(loop: EventLoopThread, code: str) -> None:
    problem, calls = asked(loop, of_the_service(Code[code], "no"), use=keep_alive)
    assert (problem.code, problem.text, calls) == (Code[code], "no", 1)


def test_only_a_message_that_is_too_large_is_to_be_made_smaller(loop: EventLoopThread) -> None:
    async def quota(connection: Connection) -> Any:
        connection.patience = 0.0
        return await keep_alive(connection)

    async def large(connection: Connection) -> Any:
        try:
            return await connection.call("KeepAlive", pb.KeepAliveRequest(sessions=["x" * (1 << 25)]), 5.0)
        except StatusError as error:
            return error

    problem, _ = asked(loop, *[of_the_network(Code.RESOURCE_EXHAUSTED, "quota exceeded")] * 9, use=quota)
    assert problem.text.endswith("quota exceeded")
    assert problem.transient
    assert not problem.too_large
    problem, calls = asked(loop, use=large)
    assert problem.code is Code.RESOURCE_EXHAUSTED
    assert problem.text.endswith("make the message smaller, or raise message_mb on both sides")
    assert problem.too_large
    assert not problem.transient
    assert calls == 0


def test_leases_are_renewed_after_any_failure(loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    call, asked_for = Connection.call, list[int]()
    errors: list[Exception] = [OSError("one's own fault"), StatusError(Code.RESOURCE_EXHAUSTED, "quota")]

    async def failing(self: Connection, *arguments: Any) -> Any:
        asked_for.append(1)
        if errors:
            raise errors.pop()
        return await call(self, *arguments)

    async def hold(connection: Connection) -> None:
        connection.patience = 0.0
        connection.hold("session", 0.15)
        assert await until(lambda: len(asked_for) >= 8, 60.0)

    monkeypatch.setattr(Connection, "call", failing)
    _, calls = asked(loop, *[of_the_network(Code.RESOURCE_EXHAUSTED, "ENHANCE_YOUR_CALM")] * 3, use=hold)
    assert calls >= 5


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of all connections."""
    call, asked_for = Connection.call, list[str]()

    async def counted(self: Connection, method: str, *arguments: Any) -> Any:
        asked_for.append(method)
        return await call(self, method, *arguments)

    monkeypatch.setattr(Connection, "call", counted)
    return asked_for


@pytest.mark.parametrize("released", [False, True])
def test_a_lease_shorter_than_those_before_is_renewed_in_time(
    loop: EventLoopThread, renewals: list[str], released: bool
) -> None:
    async def hold(connection: Connection) -> None:
        connection.hold("long", 120.0)
        await asyncio.sleep(0.05)  # its renewal is planned
        if released:
            del connection.leases["long"]
        connection.hold("short", 0.15)
        assert await until(lambda: len(renewals) >= 3, 30.0)

    asked(loop, use=hold)


def test_shorter_leases_that_come_and_go_do_not_put_off_the_renewal_of_others(
    loop: EventLoopThread, renewals: list[str]
) -> None:
    async def hold(connection: Connection) -> None:
        connection.hold("long", 0.9)
        end = asyncio.get_running_loop().time() + 30.0
        while len(renewals) < 3:
            assert asyncio.get_running_loop().time() < end
            connection.hold("short", 0.6)
            await asyncio.sleep(0.1)  # it is released before its first renewal
            del connection.leases["short"]

    asked(loop, use=hold)


def test_a_connection_closes_while_a_lease_is_renewed(loop: EventLoopThread) -> None:
    renewing = asyncio.Event()

    async def silent(context: Any) -> None:
        renewing.set()
        await asyncio.sleep(60)

    async def hold(connection: Connection) -> None:
        connection.hold("session", 0.15)
        await renewing.wait()

    _, calls = asked(loop, silent, use=hold)
    assert calls == 1
