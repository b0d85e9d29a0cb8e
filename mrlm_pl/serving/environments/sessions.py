"""The sessions of a server: each an environment instance that plays one episode, leased to a client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import grpc

from mrlm_pl.environment import Environment
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport.connection import RefusalError, StatusError

DIGEST_DIGITS, ID_DIGITS = 12, 32
REMEMBERED = 50_000
"""Number of ended sessions whose reason is kept; a late request with the key of one opens no second session."""


@dataclass(eq=False, slots=True)
class Session:
    """An episode under way.

    Args:
        id: unique id that cannot be guessed; see :meth:`SessionTable.id_of`.
        environment: instance that plays the episode.
        name: name of the environment.
        client: name of the client.
        lease_seconds: idle time after which the session ends.
        quick: whether its steps run on the event loop.
        turn: number of the next turn.
        reply: reply to the last step.
        failure: the environment's error in the next turn, which is not executed again.
        busy: running step, if there is one.
    """

    id: str
    environment: Environment
    name: str
    client: str
    lease_seconds: float
    quick: bool = False
    opened: float = field(default_factory=time.monotonic)
    touched: float = field(default_factory=time.monotonic)
    turn: int = 0
    reply: pb.StepReply | None = None
    failure: StatusError | None = None
    busy: asyncio.Future[pb.StepReply] | None = None

    def touch(self) -> None:
        """Renew the lease."""
        self.touched = time.monotonic()

    def lease_left(self) -> float:
        """Return seconds until it expires; a session that is busy does not."""
        return self.lease_seconds if self.busy is not None else self.touched + self.lease_seconds - time.monotonic()

    def description(self) -> pb.SessionDescription:
        """Return its description, with a digest instead of the id, which would let others step and close it."""
        return pb.SessionDescription(
            session=hashlib.sha256(self.id.encode()).hexdigest()[:DIGEST_DIGITS],
            environment=self.name,
            client=self.client,
            turn=self.turn,
            age_seconds=time.monotonic() - self.opened,
            lease_left_seconds=self.lease_left(),
            busy=self.busy is not None,
        )


class SessionTable(dict[str, Session]):
    """The live sessions by their id.

    Args:
        prefix: prefix of all ids.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix, self._secret = prefix, secrets.token_bytes(32)
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.opened_total = 0

    def id_of(self, key: str) -> str:
        """Return the id of the session that a key opens, a new one for an empty key.

        It begins with the worker's id, if there is one. Knowing the key does not suffice to guess it.
        """
        digest = hmac.digest(self._secret, (key or secrets.token_urlsafe()).encode(), "sha256")
        return f"{self.prefix}{digest.hex()[:ID_DIGITS]}"

    def had(self, identifier: str) -> bool:
        """Return whether a session is live, or ended a while ago at most."""
        return identifier in self or identifier in self._ended

    def add(self, session: Session) -> None:
        """Add a session."""
        self[session.id] = session
        self.opened_total += 1

    def find(self, identifier: str) -> Session:
        """Return the session, its lease renewed.

        Raises:
            RefusalError: there is no such session.
        """
        session = self.get(identifier)
        if session is None:
            reason = self._ended.get(identifier, "it was never opened here, or the server was started again")
            raise RefusalError(grpc.StatusCode.NOT_FOUND, f"session {identifier[:40]!r} is unknown: {reason}")
        session.touch()
        return session

    def end(self, session: Session, reason: str) -> bool:
        """Remove a session and keep the reason; return False if it was removed before."""
        if self.pop(session.id, None) is None:
            return False
        self._ended[session.id] = reason
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return True

    def expired(self) -> list[Session]:
        """Sessions whose lease has run out."""
        return [session for session in self.values() if session.lease_left() <= 0]
