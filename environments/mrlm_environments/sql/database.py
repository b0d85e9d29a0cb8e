"""The database of one episode: SQLite in memory, fenced in, which reads MySQL's statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mrlm_environments.sql import functions as sql_functions
from mrlm_environments.sql.dialect import SqlError, sqlite_statement
from mrlm_environments.sql.scoring import state_hash
from mrlm_pl.errors import DataError

SHOWN_CHARACTERS = 20_000
"""Characters of a result that are read, and of each of its rows; the agent sees fewer."""

STATE_CHARACTERS = 20_000_000
"""Characters of a table that are read to judge its state."""

MAX_STEPS = 20_000_000
"""Steps of SQLite's virtual machine that a statement may take: about two seconds, and the same on every machine."""

MAX_MEMORY = 256 * 1024 * 1024
"""Bytes that SQLite may hold in a process, over all databases; a statement that wants more fails."""

MAX_PAGES = 64 * 1024 * 1024 // 4096
"""Pages of one database, which are 64 MiB: it takes several episodes to fill the memory of a process."""

_FAULTS = {
    "interrupted": "the statement takes too long",
    "database or disk is full": f"the tables need too much memory: {MAX_PAGES * 4096 >> 20} MiB are the most",
}

Table = Mapping[str, Any]
"""A table of a task: ``name``, ``columns`` (names) and ``rows`` of texts."""

_ALLOWED_ACTIONS = frozenset(
    (
        *(sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE),
        *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE),
        *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_ALTER_TABLE),
        *(sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_REINDEX),
        *(sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_DROP_VIEW),
    )
)


def fence_in(connection: sqlite3.Connection) -> None:
    """Keep the statements of a connection away from files and within bounds of work and memory.

    A single call of one of SQLite's own functions is not interrupted, nor are slow functions of this package: only
    :mod:`mrlm_environments.sql.worker` stops them.

    Args:
        connection: connection with its tables in place; afterwards only tables can be reached through it.
    """
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {MAX_MEMORY}")
    connection.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, sql_functions.MAX_TEXT)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    sql_functions.install(connection)
    connection.set_progress_handler(lambda: True, MAX_STEPS)
    connection.set_authorizer(_authorized)


def _authorized(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_FUNCTION:
        allowed = str(second).lower() in sql_functions.ALLOWED
    elif action == sqlite3.SQLITE_PRAGMA:
        allowed = first == "table_info"
    else:
        allowed = action in _ALLOWED_ACTIONS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


class MemoryDatabase:
    """SQLite in the memory of this process that reads MySQL's statements.

    Args:
        tables: the task's tables; all columns hold text.

    Raises:
        DataError: SQLite cannot hold the tables.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        # Episodes run in threads, but one statement at a time.
        # SQLite counts the steps of a prepared statement over all its executions, so none is kept.
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0
        )
        self._connection.create_collation(sql_functions.COLLATION, lambda first, second: 0)
        try:
            for table in tables:
                columns = ", ".join(
                    f"{quoted(column)} TEXT COLLATE {sql_functions.COLLATION}" for column in table["columns"]
                )
                self._connection.execute(f"CREATE TABLE {quoted(table['name'])} ({columns})")
                places = ", ".join("?" * len(table["columns"]))
                self._connection.executemany(f"INSERT INTO {quoted(table['name'])} VALUES ({places})", table["rows"])
        except (sqlite3.Error, ValueError) as error:
            self._connection.close()
            raise DataError(f"sql: SQLite cannot hold the task's tables ({error}); mend the row of the data") from error
        fence_in(self._connection)

    def execute(self, query: str) -> tuple[str, bool]:
        """Execute one statement; return its rows or the number of changed rows, and whether it could change any.

        Raises:
            SqlError: the statement is rejected or fails.
        """
        before = self._connection.total_changes
        with guarded():
            cursor = self._connection.execute(sqlite_statement(query))
            shown = answer(cursor, cursor.description is not None)
        return shown, shown.startswith("OK") or self._connection.total_changes != before

    def state(self, tables: Sequence[Table]) -> str:
        """Return the hash of the present content of some tables; see :func:`~mrlm_environments.sql.scoring.state_hash`.

        Raises:
            SqlError: a table or a column is gone, or reading it takes too long.
        """
        with guarded():
            return state_hash(state_rows(self._connection.execute(reading(table))) for table in tables)

    def close(self) -> None:
        """Remove the database; may be called twice."""
        self._connection.close()


@contextmanager
def guarded() -> Iterator[None]:
    """Turn the errors of a statement into a :class:`SqlError`."""
    try:
        yield
    except MemoryError:
        raise SqlError("the statement needs too much memory") from None
    except sqlite3.Error as error:
        raise SqlError(_FAULTS.get(str(error), str(error))) from None
    except (ValueError, OverflowError) as error:  # texts that are no Unicode, numbers beyond 64 bits
        raise SqlError(str(error)) from None


def quoted(name: str) -> str:
    """Return a name in back-ticks."""
    return "`" + name.replace("`", "``") + "`"


def reading(table: Table) -> str:
    """Return the statement that reads a table's columns."""
    return f"SELECT {', '.join(map(quoted, table['columns']))} FROM {quoted(table['name'])}"


def answer(result: Any, has_rows: bool) -> str:
    """Return the answer to a statement: its rows as a list of tuples, up to :data:`SHOWN_CHARACTERS`.

    Without rows it is the number of rows that the statement changed; below 0 it is unknown.
    """
    if not has_rows:
        count = result.rowcount
        return f"OK, {count} row{'' if count == 1 else 's'} changed" if count >= 0 else "OK"
    shown, length = [], 0
    for row in result:
        shown.append(repr(tuple(row))[:SHOWN_CHARACTERS])
        length += len(shown[-1])
        if length > SHOWN_CHARACTERS:
            shown.append("and more rows")
            break
    result.close()
    return f"[{', '.join(shown)}]"


def state_rows(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return all rows of a table.

    Raises:
        SqlError: they have more than :data:`STATE_CHARACTERS`.
    """
    tuples, length = [], 0
    for row in rows:
        tuples.append(tuple(row))
        length += 50 + sum(len(str(value)) for value in row)
        if length > STATE_CHARACTERS:
            raise SqlError("the table is too large")
    return tuples
