"""The order in which several servers are asked: servers that are gone are skipped until they answer again.

All environments of a process share this knowledge.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import grpc

from mrlm_pl.concurrency.backoff import Backoff
from mrlm_pl.errors import RemoteTimeoutError
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.connection import Address, Connection, RefusalError, StatusError, connection
from mrlm_pl.serving.transport.security import Identity, read_token

logger = logging.getLogger(__name__)

FIRST_REST, LONGEST_REST = 1.0, 30.0
"""Seconds between probes of a server that is gone: the first, and the longest after doublings."""

PROBE_SECONDS = 3.0
WARNING_SECONDS = 30.0
"""Seconds between warnings that servers still do not answer, or are full."""

T = TypeVar("T")

_turns: defaultdict[tuple[Address, ...], Iterator[int]] = defaultdict(itertools.count)
"""Requests that each set of servers has had, so that the clients of other servers do not change the rotation."""

_gone: dict[Address, asyncio.Task[None]] = {}
_silent_since: dict[tuple[str, Address], tuple[float, float]] = {}
"""Servers that do not answer, with the times since when, and of the last warning."""

_full: dict[str, float] = {}
"""Servers that were full, with the time of the last warning: they take a session whenever another one ends."""


def addresses_of(
    address: str | list[str], token_file: str | None, identity: Identity, message_mb: int = 16
) -> tuple[Address, ...]:
    """Return the addresses of a client's servers, each once.

    Args:
        address: ``HOST:PORT`` of a server, or of several.
        token_file, identity, message_mb: see :class:`~mrlm_pl.serving.transport.connection.Address`.

    Raises:
        ConfigurationError: no address is given, or one is not ``HOST:PORT``; a file cannot be read.
    """
    identity.for_client()  # raises for a mistake before the first call
    read_token(token_file)
    targets = [address] if isinstance(address, str) else list(address)
    return tuple(Address(target, token_file, identity, message_mb) for target in dict.fromkeys(targets or [""]))


def in_turn(addresses: Sequence[Address]) -> list[Address]:
    """Return all addresses, each time beginning with the next; those that are gone come last."""
    first = next(_turns[tuple(addresses)]) % len(addresses)
    rotated = [*addresses[first:], *addresses[:first]]
    return sorted(rotated, key=is_gone)


@dataclass(frozen=True)
class Servers:
    """Servers that can stand in for each other.

    Args:
        addresses: addresses of all servers.
        who: name of the servers in messages.
        refusal: returns the exception for an error of a server that no repetition changes.
    """

    addresses: Sequence[Address]
    who: str
    refusal: Callable[[StatusError, Address], Exception]

    @property
    def targets(self) -> str:
        """Their addresses as text."""
        return ", ".join(address.target for address in self.addresses)

    async def first_answer(
        self,
        ask: Callable[[Connection, float], Awaitable[T]],
        seconds: float,
        again: Collection[grpc.StatusCode],
        late: str,
        rotate: bool = True,
    ) -> tuple[T, Address]:
        """Ask one after another until one answers; return its answer and its address.

        Warns of servers that do not answer, and of full ones after half of the time, every :data:`WARNING_SECONDS`
        however many requests wait for them, and when a silent one answers again.

        Args:
            ask: sends one request to a server; receives the seconds left.
            seconds: time after which no other round over all servers begins.
            again: refusals that a repetition may change; for faults of the network see :attr:`StatusError.transient`.
            late: message when the time is over, with the remedy; the last problem is added.
            rotate: begin with the next server after the last call's, rather than with the first one.

        Raises:
            RemoteTimeoutError: the time is over.
            Exception: the exception that ``refusal`` returned.
        """
        backoff = Backoff(seconds)
        while True:
            for address in in_turn(self.addresses) if rotate else sorted(self.addresses, key=is_gone):
                try:
                    answer = await ask(await connection(address), backoff.left)
                except StatusError as error:
                    problem = error
                    if not (error.transient or (isinstance(error, RefusalError) and error.code in again)):
                        raise self.refusal(error, address) from error
                    if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        self.note_gone(address, error, seconds)
                    continue
                note_back(address)
                if _silent_since.pop((self.who, address), None):
                    logger.warning("%s at %s answers again", self.who, address.target)
                return answer, address
            full, name = problem.code is grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self.who} at {self.targets}"
            if full and backoff.left < seconds / 2 and time.monotonic() - _full.get(name, -math.inf) >= WARNING_SECONDS:
                _full[name] = time.monotonic()
                logger.warning("%s is full (%s); retrying for %g s", name, problem, seconds / 2)
            if not await backoff.pause():
                raise RemoteTimeoutError(f"{late} ({problem})") from problem

    def note_gone(self, address: Address, problem: Exception, seconds: float) -> None:
        """Skip a server until it answers, and warn of it; call this on the loop of all connections.

        Args:
            address: address of the server.
            problem: answer of the server, if any.
            seconds: time for which requests are repeated if no other server answers.
        """
        if not is_gone(address):
            _gone[address] = asyncio.ensure_future(_until_back(address))
        now = time.monotonic()
        since, warned = _silent_since.get((self.who, address), (now, -math.inf))
        if now - warned < WARNING_SECONDS:
            return
        fault = f"has not answered for {now - since:.0f} s" if now > since else "does not answer"
        others = ", ".join(other.target for other in self.addresses if not is_gone(other))
        meanwhile = f"asking {others}" if others else f"retrying for {seconds:g} s"
        text = "%s at %s %s (%s); %s: start it if it is not running"
        logger.warning(text, self.who, address.target, fault, problem, meanwhile)
        _silent_since[self.who, address] = since, now


_facts: dict[Hashable, dict[str, str]] = {}
"""The first server that reported each value of a fact."""


def warn_of_difference(what: Hashable, server: str, value: str, fault: str) -> None:
    """Warn of the first server whose value differs from the others'; an empty value is unknown.

    Args:
        what: key of the fact, equal for servers that should have the same value.
        server: address of the server.
        value: value of the fact, such as the name of a model, or words NAME=DIGEST.
        fault: text of the message between the addresses of this and of the other server; ``{changed}`` in it stands
            for the names of the words that differ.
    """
    servers = _facts.setdefault(what, {})
    if value and value not in servers:
        if servers:
            before, other = next(iter(servers.items()))
            changed = sorted({word.partition("=")[0] for word in {*before.split()} ^ {*value.split()}})
            than = f"{fault.replace('{changed}', ', '.join(changed))} {'before' if other == server else other}"
            logger.warning("%s %s: rewards may differ within a run; serve the same", server, than)
        servers[value] = server


def is_gone(address: Address) -> bool:
    """Return whether a server was gone when it was last asked."""
    probe = _gone.get(address)
    return probe is not None and not probe.done()


def note_back(address: Address) -> None:
    """Stop skipping a server that has answered."""
    probe = _gone.pop(address, None)
    if probe is not None:
        probe.cancel()


async def _until_back(address: Address) -> None:
    """Probe the server in the background, at growing intervals, until it answers."""
    backoff = Backoff(first=FIRST_REST, longest=LONGEST_REST)
    while await backoff.pause():
        with suppress(StatusError):
            server = await connection(address)
            await server.call("KeepAlive", pb.KeepAliveRequest(), PROBE_SECONDS)
            return
