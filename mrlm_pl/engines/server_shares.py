"""Which servers a worker of a pool has to itself, since it hands weights to them and nobody else may."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from mrlm_pl.errors import ConfigurationError


def share_of(urls: Sequence[str], place: int, places: int) -> list[str]:
    """The servers of a worker: as many of ``urls`` as of every other, or the only one, on the worker's own machine.

    Args:
        urls: of all workers' servers.
        place: the worker's number, from 0.
        places: how many workers there are.

    Raises:
        ConfigurationError: they cannot be shared out.

    >>> share_of(["http://a:1", "http://b:1", "http://a:2", "http://b:2"], 1, 2)
    ['http://b:1', 'http://b:2']
    >>> share_of(["http://127.0.0.1:8000"], 1, 2)
    ['http://127.0.0.1:8000']
    """
    if len(urls) % places == 0:
        return list(urls[place::places])
    if len(urls) == 1 and is_of_own_machine(urls[0]):
        return list(urls)
    remedy = f"give {places} urls or a multiple, or one http://127.0.0.1:PORT: that of each worker's own machine"
    if len(urls) == 1:
        raise ConfigurationError(f"{places} workers would hand their weights to one server, {urls[0]}; {remedy}")
    raise ConfigurationError(f"{len(urls)} servers cannot be shared out among {places} workers; {remedy}")


def is_of_own_machine(url: str) -> bool:
    """Whether every machine calls a server of its own by this URL.

    >>> [is_of_own_machine(f"http://{host}:1") for host in ("localhost", "127.0.1.1", "[::1]", "10.0.0.1", "a")]
    [True, True, True, False, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def claim_of(url: str) -> str:
    """What a worker of this machine has to itself with a server: the same words wherever it is the same server."""
    if not is_of_own_machine(url):
        return f"the server {url}"
    return f"the server at port {urlsplit(url).port} of {socket.gethostname()}"
