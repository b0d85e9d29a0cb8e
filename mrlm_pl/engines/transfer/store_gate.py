"""An authenticating gate before the store of addresses of ``torch.distributed``, which has no access control.

The store listens on the loopback interface alone. The gate listens on the receivers' interface and forwards the
connections of clients that prove their knowledge of the invitation's secret, without sending it. Forwarded bytes are
not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.errors import ConfigurationError

HANDSHAKE_SECONDS = 10.0
MAX_STRANGERS = 64
"""Maximum number of concurrent connections without proof; others are closed."""

_NONCE = 32
_LOOPBACK = "127.0.0.1"
_CHUNK = 65_536
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StoreGate:
    """A store and the gate before it.

    Args:
        host: address of this machine for the receivers.
        secret: secret that opens the gate.
        seconds: deadline of the store's operations.

    Raises:
        ConfigurationError: this machine has no such address.

    Attributes:
        store: store of this process.
        port: port of the gate.
    """

    def __init__(self, host: str, secret: str, seconds: float) -> None:
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
        self._secret, self._loop = secret.encode(), EventLoopThread()
        self._strangers = asyncio.Semaphore(MAX_STRANGERS)
        try:
            self._server = self._loop.submit(asyncio.start_server(self._receive, host, 0)).result()
        except OSError as error:
            self._loop.close()
            raise ConfigurationError(
                f"the weights cannot be offered at {host!r} ({error}); give an address of this machine"
            ) from error
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Close the gate and its connections; may be called twice."""
        if not self._loop.closed:
            self._loop.call_soon(self._server.close)
            self._loop.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio reports a cancelled connection as a fault
        with suppress(OSError, EOFError, asyncio.CancelledError):
            if not self._strangers.locked():
                async with self._strangers:
                    proved = await asyncio.wait_for(self._is_proved(reader, writer), HANDSHAKE_SECONDS)
                if proved:
                    await _join((reader, writer), await asyncio.open_connection(_LOOPBACK, self._inside))
        writer.close()

    async def _is_proved(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = secrets.token_bytes(_NONCE)
        writer.write(nonce)
        peer_nonce, proof = await reader.readexactly(_NONCE), await reader.readexactly(_NONCE)
        proved = hmac.compare_digest(proof, _proof(self._secret, b"receiver", nonce, peer_nonce))
        if proved:
            writer.write(_proof(self._secret, b"sender", peer_nonce, nonce))
        return proved


def reached_store(host: str, port: int, secret: str, seconds: float) -> dist.TCPStore:
    """Return the store behind a gate.

    Raises:
        RuntimeError: the gate does not answer, or does not know the secret.
    """
    limit = min(seconds, HANDSHAKE_SECONDS)
    try:
        here = _receivers().submit(asyncio.wait_for(_open(host, port, secret.encode(), seconds), limit)).result()
    except EOFError as error:
        raise RuntimeError(f"{host}:{port}: the connection was closed before the secret was proved") from error
    except OSError as error:
        raise RuntimeError(f"{host}:{port} does not answer: {error or f'no answer within {limit:g} s'}") from error
    return dist.TCPStore(_LOOPBACK, here, is_master=False, timeout=timedelta(seconds=seconds))


async def _open(host: str, port: int, secret: bytes, seconds: float) -> int:
    """Pass a gate; return the loopback port whose first connection from this process is forwarded to it.

    Without such a connection within ``seconds`` the port and the connection to the gate are closed.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        peer_nonce, nonce = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
        writer.write(nonce + _proof(secret, b"receiver", peer_nonce, nonce))
        if not hmac.compare_digest(await reader.readexactly(_NONCE), _proof(secret, b"sender", nonce, peer_nonce)):
            raise RuntimeError(f"{host}:{port} is not the sender of the weights")
    except BaseException:  # also a cancellation
        writer.close()
        raise

    async def forward(here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        if not server.is_serving() or not _is_of_this_process(back):
            back.close()
            return
        server.close()
        await _join((here, back), (reader, writer))

    def expire() -> None:
        if server.is_serving():
            server.close()
            writer.close()

    server = await asyncio.start_server(forward, _LOOPBACK, 0)
    asyncio.get_running_loop().call_later(seconds, expire)
    return int(server.sockets[0].getsockname()[1])


def _is_of_this_process(connection: asyncio.StreamWriter) -> bool:
    """Return whether this process opened a connection over loopback; the gate's proof is its own alone."""
    import psutil  # comes with Ray

    ends = [connection.get_extra_info(name)[1] for name in ("peername", "sockname")]
    connections = psutil.Process().net_connections("tcp")  # the addresses may be written as those of IPv6
    return any(entry.raddr and [entry.laddr.port, entry.raddr.port] == ends for entry in connections)


@cache
def _receivers() -> EventLoopThread:
    """Return the loop of this process's connections to gates."""
    return EventLoopThread()


async def _join(first: _Connection, second: _Connection) -> None:
    """Forward bytes between two connections until one of them ends."""
    await asyncio.gather(_forward(first[0], second[1]), _forward(second[0], first[1]))


async def _forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await source.read(_CHUNK):
            target.write(content)
            await target.drain()
    target.close()


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, who + first + second, "sha256")
