"""An authenticating gate before the store of addresses of ``torch.distributed``, which has no access control.

The store itself listens on the loopback interface alone. The gate listens on the interface that receivers reach, and
forwards the connections of clients that prove that they know the secret of the invitation; the secret itself is not
sent. Forwarded bytes are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from mrlm_pl.errors import ConfigurationError

HANDSHAKE_SECONDS = 10.0
MAX_STRANGERS = 64
"""Connections at once that have not proved anything; further ones are closed."""

_NONCE = 32
_LOOPBACK = "127.0.0.1"
_CHUNK = 65_536


def new_secret() -> str:
    """Return a random secret of 256 bits."""
    return secrets.token_hex(32)


class StoreGate:
    """A store and the gate before it.

    Args:
        host: address of this machine at which receivers reach it.
        secret: what they must know.
        seconds: deadline of the store's operations.

    Raises:
        ConfigurationError: this machine has no such address.

    Attributes:
        store: for use in this process.
        port: of the gate.
    """

    def __init__(self, host: str, secret: str, seconds: float) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise ConfigurationError(
                f"the weights cannot be offered at {host!r} ({error}); give an address of this machine"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        inside = socket.create_server((_LOOPBACK, 0))
        self._inside = int(inside.getsockname()[1])
        self.store = dist.TCPStore(
            _LOOPBACK,
            self._inside,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=inside.detach(),
            timeout=timedelta(seconds=seconds),
        )
        self._secret = secret.encode()
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        threading.Thread(target=self._listen, name="store-gate", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections; may be called twice."""
        with suppress(OSError):  # closed before; a thread that waits for a connection is woken by it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):
                end = time.monotonic() + HANDSHAKE_SECONDS
                connection.settimeout(HANDSHAKE_SECONDS)
                own = secrets.token_bytes(_NONCE)
                connection.sendall(own)
                theirs = _read(connection, _NONCE, end)
                proof = _read(connection, _NONCE, end)
                if hmac.compare_digest(proof, _proof(self._secret, b"receiver", own, theirs)):
                    connection.sendall(_proof(self._secret, b"sender", theirs, own))
                    join(connection, socket.create_connection((_LOOPBACK, self._inside), HANDSHAKE_SECONDS))
                    return
            connection.close()
        finally:
            self._strangers.release()


def reached_store(host: str, port: int, secret: str, seconds: float) -> dist.TCPStore:
    """Return the store behind a gate.

    Raises:
        RuntimeError: the gate does not answer, or does not know the secret.
    """
    try:
        end = time.monotonic() + min(seconds, HANDSHAKE_SECONDS)
        connection = socket.create_connection((host, port), min(seconds, HANDSHAKE_SECONDS))
        theirs, own = _read(connection, _NONCE, end), secrets.token_bytes(_NONCE)
        connection.sendall(own + _proof(secret.encode(), b"receiver", theirs, own))
        if not hmac.compare_digest(_read(connection, _NONCE, end), _proof(secret.encode(), b"sender", own, theirs)):
            raise RuntimeError(f"{host}:{port} is not the sender of the weights")
    except OSError as error:
        raise RuntimeError(f"{host}:{port} does not answer: {error}") from error
    with socket.create_server((_LOOPBACK, 0)) as listener:
        listener.settimeout(seconds)
        threading.Thread(target=_accept, args=(listener.dup(), connection), daemon=True).start()
        there = listener.getsockname()[1]
        return dist.TCPStore(_LOOPBACK, there, is_master=False, timeout=timedelta(seconds=seconds))


def join(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes between two connections, in threads, until one of them ends."""
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for source, target in ((one, other), (other, one)):
        threading.Thread(target=_pass, args=(source, target), daemon=True).start()


def _accept(listener: socket.socket, connection: socket.socket) -> None:
    """Join the first connection with one that is there."""
    try:
        with listener:
            here, _ = listener.accept()
    except OSError:  # no connection in time
        connection.close()
        return
    join(here, connection)


def _pass(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # one end is gone; the other is closed below
        while content := source.recv(_CHUNK):
            target.sendall(content)
    for connection in (source, target):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    source.close()


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, who + first + second, "sha256")


def _read(connection: socket.socket, count: int, end: float) -> bytes:
    """Read ``count`` bytes until a time of the monotonic clock, however slowly they arrive."""
    content = b""
    while len(content) < count:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        more = connection.recv(count - len(content))
        if not more:
            raise ConnectionError("the connection was closed before the secret was proved")
        content += more
    return content
