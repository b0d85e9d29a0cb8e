"""A client's connection: refusals, faults of the network and leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.connection import Address, Connection, StatusError, refuse

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

    return loop.submit(run()).result(30)


async def keep_alive(connection: Connection) -> Any:
    """Return the reply, or the problem."""
    try:
        return await connection.call("KeepAlive", pb.KeepAliveRequest(), 5.0)
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
    assert (problem.code, problem.text, problem.refused, calls) == (Code.ABORTED, arrives, True, 1)
