"""Only those who know the secret reach the store in which the sender and the receivers of weights meet."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from mrlm_pl.engines.transfer import store_gate
from mrlm_pl.engines.transfer.broadcast import WeightSender
from mrlm_pl.engines.transfer.store_gate import StoreGate, reached_store
from mrlm_pl.errors import ConfigurationError

HOST = "127.0.0.1"


@pytest.fixture
def gate() -> Iterator[StoreGate]:
    made = StoreGate(HOST, "right", 60.0)
    yield made
    made.close()


def listening() -> set[str]:
    """Return the addresses on which this process takes connections."""
    return {found.laddr.ip for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN}


def test_those_who_know_the_secret_share_the_store(gate: StoreGate) -> None:
    stores = [reached_store(HOST, gate.port, "right", 60.0) for _ in range(3)]
    for number, store in enumerate(stores):
        store.set(f"key {number}", "x" * 100_000)
    assert all(gate.store.get(f"key {number}") == b"x" * 100_000 for number in range(3))
    gate.store.set("back", "yes")
    assert [store.get("back") for store in stores] == [b"yes"] * 3


def test_a_gate_is_closed_in_silence_while_a_receiver_is_connected(
    gate: StoreGate, caplog: pytest.LogCaptureFixture
) -> None:
    store = reached_store(HOST, gate.port, "right", 60.0)
    store.set("a", "b")
    gate.close()
    own = {threading.get_ident(), gate._loop._thread.ident}
    assert not [record for record in caplog.records if record.thread in own]


def test_others_do_not(gate: StoreGate) -> None:
    with pytest.raises(RuntimeError, match="closed before the secret was proved"):
        reached_store(HOST, gate.port, "wrong", 60.0)
    with pytest.raises(dist.DistError):
        dist.TCPStore(HOST, gate.port, is_master=False, timeout=timedelta(seconds=1))
    assert gate.store.num_keys() <= 1, "a store counts its own key"


def test_a_recorded_handshake_cannot_be_played_again(gate: StoreGate, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    proof = store_gate._proof

    def recorded(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
        found = proof(secret, who, first, second)
        if who == b"receiver":
            sent.append(second + found)
        return found

    monkeypatch.setattr(store_gate, "_proof", recorded)
    reached_store(HOST, gate.port, "right", 60.0)
    with socket.create_connection((HOST, gate.port), 60.0) as replay:
        replay.recv(32)
        replay.sendall(sent[0])
        assert replay.recv(32) == b""


def test_a_false_gate_is_not_believed() -> None:
    with socket.create_server((HOST, 0)) as false:
        other = socket.create_connection(false.getsockname()[:2])
        here, _ = false.accept()
        other.close()
        here.close()
        threading.Thread(target=_answer_anything, args=(false,), daemon=True).start()
        with pytest.raises(RuntimeError, match="is not the sender of the weights"):
            reached_store(HOST, false.getsockname()[1], "right", 60.0)


def _answer_anything(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.sendall(b"n" * 32)
    connection.recv(64)
    connection.sendall(b"p" * 32)


def test_strangers_who_say_nothing_keep_nobody_out(gate: StoreGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_gate, "HANDSHAKE_SECONDS", 0.5)
    silent = [socket.create_connection((HOST, gate.port), 60.0) for _ in range(store_gate.MAX_STRANGERS + 10)]
    deadline = time.monotonic() + 100
    while True:
        try:
            reached_store(HOST, gate.port, "right", 60.0).set("a", "b")
            break
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for connection in silent:
        connection.close()


def test_a_stranger_who_sends_byte_by_byte_is_closed_in_time(gate: StoreGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_gate, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_connection((HOST, gate.port), 60.0) as slow:
        assert len(slow.recv(32)) == 32
        slow.settimeout(0.1)
        sent = 0
        while sent < 64:
            try:
                slow.sendall(b"x")
                sent += 1
                assert slow.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert sent < 40, "the gate has a deadline for each byte"


def ends(*kinds: str, port: int = 0) -> set[Any]:
    """Return the TCP connections and listeners of this process, of one port if it is given."""
    found = [item for item in psutil.Process().net_connections("tcp") if item.status in kinds]
    return {(item.laddr, item.raddr) for item in found if port in (0, *item.laddr[1:], *item.raddr[1:])}


def no_store(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("no store")


def test_a_gate_whose_store_fails_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "TCPStore", no_store)
    before, loops = ends(psutil.CONN_LISTEN), []
    monkeypatch.setattr(store_gate, "EventLoopThread", lambda: loops.append("started"))
    with pytest.raises(RuntimeError, match="no store"):
        StoreGate(HOST, "right", 60.0)
    assert not loops, "nothing listens before there is a store"
    assert len(ends(psutil.CONN_LISTEN) - before) <= 1, "the store owns the socket that it is given"


def test_a_receiver_whose_store_fails_leaves_nothing_open(gate: StoreGate, monkeypatch: pytest.MonkeyPatch) -> None:
    def connections() -> set[Any]:
        return ends(psutil.CONN_ESTABLISHED, port=gate.port) | ends(psutil.CONN_LISTEN)

    before = connections()
    monkeypatch.setattr(dist, "TCPStore", no_store)
    with pytest.raises(RuntimeError, match="no store"):
        reached_store(HOST, gate.port, "right", 2.0)
    opened = connections() - before
    assert opened
    end = time.monotonic() + 100
    while connections() & opened:
        assert time.monotonic() < end, "the connection to the gate and the loopback port stay open"
        time.sleep(0.1)


def test_another_process_does_not_pass_a_proved_gate(gate: StoreGate, monkeypatch: pytest.MonkeyPatch) -> None:
    made, answers = dist.TCPStore, list[bytes]()
    stranger = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 60).recv(1))"

    def after_a_stranger(host: str, port: int, **options: Any) -> dist.TCPStore:
        answers.append(subprocess.check_output([sys.executable, "-c", stranger, str(port)]).strip())
        return made(host, port, **options)

    monkeypatch.setattr(dist, "TCPStore", after_a_stranger)
    reached_store(HOST, gate.port, "right", 60.0).set("a", "b")
    assert answers == [b"b''"], "the connection of the other process was closed"
    assert gate.store.get("a") == b"b"


def test_a_sender_listens_on_its_own_address_alone() -> None:
    before = listening()
    sender = WeightSender()
    assert listening() - before <= {HOST}
    invitation = sender.invite(1)
    assert invitation.secret not in repr(invitation)
    with pytest.raises(dist.DistError):
        dist.TCPStore(HOST, invitation.port, is_master=False, timeout=timedelta(seconds=1))
    sender.close()
    sender.close()
    with pytest.raises(ConfigurationError, match=r"cannot be offered at '192\.0\.2\.1'"):
        WeightSender("192.0.2.1")
