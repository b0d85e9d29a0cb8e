"""Which of several servers to ask first: those that were gone lately are passed over until they answer again.

What is known is shared by all environments of a process, so that not each episode finds out for itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.connection import Address, StatusError, connection
from mrlm_pl.serving.transport.security import Identity, read_token

FIRST_REST, LONGEST_REST = 1.0, 30.0
"""Seconds after which a server that was gone is asked whether it is back; doubled each time that it is not."""

PROBE_SECONDS = 3.0

_turns = itertools.count()
_gone: dict[Address, asyncio.Task[None]] = {}


def addresses_of(
    address: str | list[str], token_file: str | None, identity: Identity, message_mb: int = 16
) -> tuple[Address, ...]:
    """The addresses of a client's servers, each once.

    Args:
        address: ``HOST:PORT`` of a server, or of several.
        token_file, identity, message_mb: see :class:`~mrlm_pl.serving.transport.connection.Address`.

    Raises:
        ConfigurationError: no address is given, or one is not ``HOST:PORT``; a file cannot be read.
    """
    identity.for_client()  # a mistake is told before the first call
    read_token(token_file)
    targets = [address] if isinstance(address, str) else list(address)
    return tuple(Address(target, token_file, identity, message_mb) for target in dict.fromkeys(targets or [""]))


def in_turn(addresses: Sequence[Address]) -> list[Address]:
    """All addresses, each time beginning with the next; those that are gone come last."""
    first = next(_turns) % len(addresses)
    turned = [*addresses[first:], *addresses[:first]]
    return sorted(turned, key=is_gone)


def is_gone(address: Address) -> bool:
    """Whether a server was gone when it was last asked."""
    asking = _gone.get(address)
    return asking is not None and not asking.done()


def note_gone(address: Address) -> None:
    """Pass the server over until it answers; to be called on the loop of all connections."""
    if not is_gone(address):
        _gone[address] = asyncio.ensure_future(_until_back(address))


def note_back(address: Address) -> None:
    """The server has answered."""
    asking = _gone.pop(address, None)
    if asking is not None:
        asking.cancel()


async def _until_back(address: Address) -> None:
    """Ask in the background, ever more rarely, until the server answers whatever it is."""
    rest = FIRST_REST
    while True:
        await asyncio.sleep(rest)
        rest = min(2 * rest, LONGEST_REST)
        try:
            server = await connection(address)
            await server.operation(PROBE_SECONDS, keep_alive=pb.KeepAliveRequest())
            return
        except StatusError:
            continue


os.register_at_fork(after_in_child=_gone.clear)  # a forked process has none of its parent's tasks
