"""Ports of this machine on which nothing listens."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def nowhere() -> str:
    """Return an address ``HOST:PORT`` on which nothing listens."""
    return f"127.0.0.1:{free_port()}"
