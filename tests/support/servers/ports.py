"""Ports of this machine on which nothing listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()


def free_port() -> int:
    """Return a port on which no server listens; the system gives it only to those that ask for it."""
    lowest = int(RANGE.read_text().split()[0]) if RANGE.exists() else 49_152
    while True:
        port = _random.randrange(10_000, lowest if lowest > 12_000 else 65_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # taken
            continue
        return port


def nowhere() -> str:
    """Return an address ``HOST:PORT`` on which nothing listens."""
    return f"127.0.0.1:{free_port()}"
