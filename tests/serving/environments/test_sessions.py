from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mrlm_pl.serving.environments import sessions
from mrlm_pl.serving.environments.sessions import Session, SessionTable
from mrlm_pl.serving.transport.connection import RefusalError


def session(table: SessionTable, lease: float = 10.0, **fields: Any) -> Session:
    made = Session(table.id_of(""), None, "echo", "client", lease, **fields)  # type: ignore[arg-type]
    made.opened = made.touched = sessions.time.monotonic()
    table.add(made)
    return made


def test_ids_are_long_and_never_the_same() -> None:
    table = SessionTable()
    ids = {table.id_of("") for _ in range(10_000)}
    assert len(ids) == 10_000
    assert min(map(len, ids)) >= 32, "128 bits"


def test_a_key_has_one_id_that_only_its_table_knows() -> None:
    first, second = SessionTable("worker."), SessionTable("worker.")
    assert first.id_of("key") == first.id_of("key") != first.id_of("kez")
    assert first.id_of("key") != second.id_of("key"), "a server that was started again, or another one"
    assert first.id_of("key").startswith("worker.")


def test_a_lease_is_renewed_by_every_call(clock: SimpleNamespace) -> None:
    table = SessionTable()
    mine, idle = session(table), session(table)
    clock.now += 9
    assert table.find(mine.id) is mine
    assert table.expired() == []
    clock.now += 1
    assert table.expired() == [idle]
    assert mine.lease_left() == 9
    clock.now += 9
    assert set(table.expired()) == {mine, idle}


def test_a_session_that_is_busy_does_not_expire(clock: SimpleNamespace) -> None:
    table = SessionTable()
    mine = session(table)
    loop = asyncio.new_event_loop()
    mine.busy = loop.create_future()
    clock.now += 100
    assert table.expired() == []
    mine.busy = None
    assert table.expired() == [mine]
    loop.close()


def test_an_ended_session_tells_why() -> None:
    table = SessionTable()
    mine, other = session(table), session(table)
    assert table.end(mine, "it was closed")
    assert not table.end(mine, "another reason")
    assert len(table) == 1
    assert list(table.values()) == [other]
    with pytest.raises(RefusalError, match=f"session '{mine.id}' is unknown: it was closed"):
        table.find(mine.id)
    with pytest.raises(RefusalError, match="never opened here, or the server was started again"):
        table.find("nonsense")
    assert table.opened_total == 2


def test_reasons_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED", 3)
    table = SessionTable()
    ended = [session(table) for _ in range(5)]
    for number, item in enumerate(ended):
        table.end(item, f"reason {number}")
    with pytest.raises(RefusalError, match="never opened here"):
        table.find(ended[1].id)
    with pytest.raises(RefusalError, match="reason 2"):
        table.find(ended[2].id)
