"""Malformed requests at the gateway's port."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mrlm_pl.environment.prompts import Prompt, Reply
from mrlm_pl.episode import Message
from mrlm_pl.serving.gateway.protocol import first_stop, served_form
from mrlm_pl.serving.gateway.server import Gateway
from mrlm_pl.serving.gateway.session import Limits, Session
from tests.support.servers.environment_servers import eventually

CALL = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
NEXT = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"


@pytest.fixture
def gateway() -> Iterator[Any]:
    made = Gateway()
    session = made.add(Session(("agent",), Limits(), {}, ()))
    made.submit(begin(session)).result()
    yield made, made.endpoint(session)
    made.submit(made.remove(session)).result()
    made.rest()


async def begin(session: Session) -> None:
    session.program = asyncio.get_running_loop().create_future()


def test_an_episode_whose_start_was_cancelled_is_removed() -> None:
    made = Gateway()
    session = made.add(Session(("agent",), Limits(), {}, ()))
    endpoint = made.endpoint(session)
    made.patient = True  # it keeps listening
    made.submit(made.remove(session)).result(10)
    assert sent(endpoint, NEXT).startswith("HTTP/1.1 410")
    made.patient = False
    made.rest()


def test_it_listens_until_the_programs_of_its_episodes_have_ended() -> None:
    made, cancelled, released = Gateway(), threading.Event(), asyncio.Event()
    session = made.add(Session(("agent",), Limits(), {}, ()))

    async def program() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
            await released.wait()

    async def start() -> None:
        session.program = asyncio.ensure_future(program())
        await asyncio.sleep(0)

    async def release() -> None:
        released.set()

    made.submit(start()).result(10)
    removed = made.submit(made.remove(session))
    assert cancelled.wait(10)
    made.rest()  # the environment of another episode closes
    made.submit(release()).result(10)
    removed.result(10)
    made.rest()


def sent(endpoint: Any, text: str) -> str:
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(text.format(key=endpoint.key).encode())
        return connection.recv(4096).decode()


@pytest.mark.parametrize(
    "text",
    [
        CALL + "Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nno",
        "BREW / HTTP/9.9\r\n\r\n",
        "GET / HTTP/1.1\r\nHost\r\n\r\n",
        "\x16\x03\x01\r\n\r\n",
    ],
    ids=["no gzip", "version", "header", "TLS"],
)
def test_a_malformed_request_is_answered_and_not_logged_as_an_error(
    text: str, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, endpoint = gateway
    assert sent(endpoint, text).startswith(("HTTP/1.1 400", "HTTP/1.0 400"))
    assert sent(endpoint, NEXT).startswith("HTTP/1.1 200")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_program_that_leaves_during_its_request_is_not_logged_as_an_error(
    gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, endpoint = gateway
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = CALL.format(key=endpoint.key) + "Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall((head + "{").encode())
        assert b" 100 " in connection.recv(100), "the body is being read"
    for _ in range(2):  # the second is answered after the end of the first
        assert sent(endpoint, NEXT).startswith("HTTP/1.1 200")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_program_that_leaves_during_its_answer_is_counted_and_not_logged_as_an_error(
    gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, endpoint = gateway
    (session,) = made._sessions.values()
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"model": "agent", "stream": True, "messages": [{"role": "user", "content": "Q"}]})

    async def answer() -> None:
        await session.next()
        session.answer({"agent": Message("assistant", "x" * 2**25)})  # more than the buffers of sockets hold

    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = CALL.format(key=endpoint.key) + f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        made.submit(answer()).result(60)
        assert connection.recv(5) == b"HTTP/"
    eventually(lambda: session.counts["disconnected"] == 1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("content", "stops", "parts", "stop"),
    [
        ("7, 8\n9", ["9", "\n"], ("", "7, 8"), "\n"),
        ("<think>\n7 or 8</think>9\n", ["\n"], ("7 or 8", "9"), "\n"),
        ("<think>\n7 or 8", ["\n", "<think>"], ("7 or 8", ""), None),
        ("<think>\n7 or", ["or"], ("7", ""), "or"),
    ],
)
def test_a_stop_text_is_not_that_of_the_tags_around_the_reasoning(
    content: str, stops: list[str], parts: tuple[str, str], stop: str | None
) -> None:
    reply, prompt = Reply("assistant", content), Prompt((Message("user", "?"),), stop=tuple(stops))
    assert served_form(reply, prompt, 0)[:2] == parts
    assert first_stop(reply, stops)[1] == stop
