"""Servers of the viewer in tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import RawTestServer, TestClient, TestServer
from yarl import URL

from mrlm_pl.viewer.runs import find_runs
from mrlm_pl.viewer.server import application


@dataclass
class Reply:
    """A response of the viewer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)


Asking = Callable[..., Reply]


@pytest.fixture
def ask() -> Asking:
    """Return a function that starts the viewer on a folder and sends one request with an address as it stands."""

    def send(given: Path, address: str, token: str | None = None, **headers: str) -> Reply:
        async def exchange() -> Reply:
            server = TestServer(application(find_runs([str(given)]), token))
            assert not isinstance(server, RawTestServer)
            async with TestClient(server) as client:
                url = URL(f"http://127.0.0.1:{server.port}{address}", encoded=True)
                async with client.session.get(url, headers=headers, allow_redirects=False) as reply:
                    return Reply(reply.status, dict(reply.headers), await reply.read())

        return asyncio.run(exchange())

    return send
