"""Malformed requests at the gateway's port."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mrlm_pl.serving.gateway.server import Gateway
from mrlm_pl.serving.gateway.session import Limits, Session

CALL = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
NEXT = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"


@pytest.fixture
def gateway() -> Iterator[Any]:
    made = Gateway()
    session = made.add(lambda: Session(("agent",), Limits(), {}, ()))
    yield made, made.endpoint(session)
    made.submit(made.remove(session)).result()
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
