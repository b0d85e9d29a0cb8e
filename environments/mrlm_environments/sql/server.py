"""The database of one episode on a server that SQLAlchemy reaches, such as MySQL or MariaDB."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mrlm_environments.libraries import library
from mrlm_environments.sql.database import Table, answer, guarded, reading, state_rows
from mrlm_environments.sql.dialect import SqlError
from mrlm_environments.sql.scoring import state_hash
from mrlm_pl.errors import ConfigurationError, MRLMError

BACKENDS = ("mysql", "mariadb")


class ServerDatabase:
    """A fresh database on a server, reached through SQLAlchemy; it is dropped at the end.

    Statements go to the server as they are.

    Args:
        url: SQLAlchemy's URL, such as ``mysql+pymysql://user:password@host``.
        tables: the task's tables; all columns hold text.
        seconds: deadline of a statement.

    Attributes:
        collation: collation of the columns; None is the server's default.

    Raises:
        ConfigurationError: the URL is of another kind, SQLAlchemy or the driver is not installed, or the server does
            not answer.
    """

    collation: str | None = None

    def __init__(self, url: str, tables: Sequence[Table], seconds: float) -> None:
        sqlalchemy = library("sqlalchemy", "sql", "sql: database_url")
        try:
            parsed = sqlalchemy.make_url(url)
            if parsed.get_backend_name() not in BACKENDS:
                raise ConfigurationError(
                    f"sql: database_url names {parsed.get_backend_name()!r}; the tasks are MySQL's, use one of "
                    f"{', '.join(BACKENDS)}"
                )
            waits = {"read_timeout": int(seconds) + 10, "connect_timeout": 10}
            options: dict[str, Any] = {"connect_args": waits} if parsed.drivername == "mysql+pymysql" else {}
            self._engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT", **options)
        except (ImportError, sqlalchemy.exc.ArgumentError) as error:
            raise ConfigurationError(
                f"sql: database_url cannot be used ({error}); give SQLAlchemy's URL, such as "
                "mysql+pymysql://user:password@host, and pip install 'mrlm[sql]' for the driver"
            ) from error
        self._sqlalchemy, self._name = sqlalchemy, f"mrlm_{uuid.uuid4().hex}"
        try:
            self._connection = self._engine.connect()
            self._enter(seconds)
            self._fill(tables)
        except sqlalchemy.exc.SQLAlchemyError as error:
            self._engine.dispose()
            shown = parsed.render_as_string(hide_password=True)
            raise ConfigurationError(
                f"sql: no database can be made at {shown} ({error}); check the server and the account's rights"
            ) from error

    def _enter(self, seconds: float) -> None:
        mariadb = getattr(self._engine.dialect, "is_mariadb", False)
        limit = f"max_statement_time = {seconds}" if mariadb else f"max_execution_time = {int(seconds * 1000)}"
        self._run(f"CREATE DATABASE {self._name} CHARACTER SET utf8mb4")
        self._run(f"USE {self._name}")
        self._run(f"SET SESSION {limit}")

    def _fill(self, tables: Sequence[Table]) -> None:
        text, metadata = self._sqlalchemy.Text(collation=self.collation), self._sqlalchemy.MetaData()
        for table in tables:
            columns = [self._sqlalchemy.Column(column, text) for column in table["columns"]]
            created_table = self._sqlalchemy.Table(table["name"], metadata, *columns)
            created_table.create(self._connection, checkfirst=False)
            if table["rows"]:
                rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
                self._connection.execute(created_table.insert(), rows)

    def _run(self, statement: str) -> Any:
        # Without the option a percent sign in the statement would be taken for a place of a parameter.
        return self._connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

    def execute(self, query: str) -> str:
        """See :meth:`SqliteDatabase.execute`."""
        with self._guarded():
            result = self._run(query)
            return answer(result, result.returns_rows)

    def state(self, tables: Sequence[Table]) -> str:
        """See :meth:`MemoryDatabase.state`."""
        with self._guarded():
            return state_hash(state_rows(self._run(reading(table))) for table in tables)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with guarded():
                yield
        except self._sqlalchemy.exc.SQLAlchemyError as error:
            if getattr(error, "connection_invalidated", False):
                raise MRLMError(f"sql: the server closed the connection ({error}); check that it runs") from error
            raise SqlError(str(getattr(error, "orig", None) or error)) from None

    def close(self) -> None:
        """See :meth:`MemoryDatabase.close`."""
        if not self._connection.closed:
            self._run(f"DROP DATABASE IF EXISTS {self._name}")
            self._connection.close()
        self._engine.dispose()
