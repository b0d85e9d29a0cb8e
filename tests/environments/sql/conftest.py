from __future__ import annotations

import pytest
from mrlm_environments.sql import environment, server

from tests.support.environments.sql_rows import SqliteServer


@pytest.fixture(autouse=True)
def servers_are_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``database_url="sqlite://"`` open a database in this process."""
    monkeypatch.setattr(server, "BACKENDS", (*server.BACKENDS, "sqlite"))
    monkeypatch.setattr(environment, "ServerDatabase", SqliteServer)
