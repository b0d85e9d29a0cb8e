"""A table with awkward names and values, and a server that needs no installation."""

from __future__ import annotations

from mrlm_environments.sql.database import fence_in
from mrlm_environments.sql.dialect import sqlite_statement
from mrlm_environments.sql.functions import COLLATION
from mrlm_environments.sql.server import ServerDatabase

TEAMS = {
    "name": "2nd league",
    "columns": ["1st name", "Points", "founded"],
    "rows": [
        ("Zoë", "9", "2001-05-30"),
        ("ADA", "10", "1999-12-31"),
        ("O'Neil", "9.5", "n/a"),
        ("50% off", "1,200", ""),
    ],
}


class SqliteServer(ServerDatabase):
    """SQLAlchemy's SQLite in this process, which translates MySQL's statements; it is fenced in."""

    collation = COLLATION

    def _enter(self, seconds: float) -> None:
        fence_in(self._connection.connection.driver_connection)

    def execute(self, query: str) -> str:
        return super().execute(sqlite_statement(query))

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()
