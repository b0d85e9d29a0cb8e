from __future__ import annotations

import ast
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mrlm_environments.sql import worker as sql_worker
from mrlm_environments.sql.database import MemoryDatabase, state_rows
from mrlm_environments.sql.dialect import SqlError, sqlite_statement
from mrlm_environments.sql.worker import SqliteDatabase

from tests.support.environments.sql_rows import TEAMS, SqliteServer


@pytest.fixture(params=[None, "sqlite://"])
def database(request: pytest.FixtureRequest):
    found = SqliteDatabase([TEAMS], 30.0) if request.param is None else SqliteServer(request.param, [TEAMS], 3.0)
    yield found
    found.close()


def selected(database: Any, query: str) -> list[Any]:
    """Return the values of a result, row after row."""
    return [value for row in ast.literal_eval(database.execute(query)) for value in row]


# MySQL's statements on SQLite


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT `1st name` FROM `2nd league` WHERE `1st name` = 'zoe'", ["Zoë"]),
        ("SELECT Points FROM `2nd league` WHERE `1st name` IN ('ada', 'x')", ["10"]),
        ("SELECT Points FROM `2nd league` WHERE `1st name` LIKE 'ZO_'", ["9"]),
        (r"SELECT Points FROM `2nd league` WHERE `1st name` LIKE '50\%%'", ["1,200"]),
        (r"SELECT Points FROM `2nd league` WHERE `1st name` = 'O\'Neil'", ["9.5"]),
        ('SELECT Points FROM `2nd league` WHERE `1st name` = "O\'Neil"', ["9.5"]),
        ("SELECT `1st name` FROM `2nd league` WHERE Points > 9", ["ADA", "O'Neil"]),
        ("SELECT COUNT(*) FROM `2nd league` WHERE Points BETWEEN 9 AND 10", [3]),
        ("SELECT COUNT(*) FROM `2nd league` WHERE Points = (SELECT MAX(Points + 0) FROM `2nd league`)", [1]),
        ("SELECT MAX(Points), MAX(Points + 0), SUM(Points) FROM `2nd league`", ["9.5", 10.0, 29.5]),
        ("SELECT `1st name` FROM `2nd league` ORDER BY `1st name` LIMIT 1, 2", ["ADA", "O'Neil"]),
        ("SELECT CAST(REPLACE(Points, ',', '') AS UNSIGNED) FROM `2nd league` ORDER BY 1 DESC LIMIT 1", [1200]),
        ("SELECT CONCAT_WS('-', 'a', NULL, 2), SUBSTRING_INDEX('a b c', ' ', -2)", ["a-2", "b c"]),
        ("SELECT IF(1 > 2, 'x', 'y'), IFNULL(NULL, 3), FIELD('B', 'a', 'b'), LOCATE('B', 'abc')", ["y", 3, 2, 2]),
        ("SELECT 'Zoë' NOT LIKE 'zo%', 'a%' LIKE '_|%' ESCAPE '|', 'ab' LIKE 'a', NULL LIKE 'a'", [0, 1, 0, None]),
        (r"SELECT 'C:\\' LIKE 'c:\\', 'C:\\a' LIKE '%\\', 'a\\' LIKE '_|\\' ESCAPE '|'", [1, 0, 1]),
        ("SELECT 'a_b' LIKE 'a_b' ESCAPE '', 'a%' LIKE 'ab' ESCAPE ''", [1, 0]),
        ("SELECT LEFT('abc', 2), RIGHT('abc', 2), LPAD('7', 3, '0'), REVERSE('abc')", ["ab", "bc", "007", "cba"]),
        (
            "SELECT LPAD('abc', 2, 'x'), RPAD('abc', 2, 'x'), RPAD('a', 4, 'xy'), LPAD('a', 2, '')",
            ["ab", "ab", "axyx", None],
        ),
        (
            "SELECT SUBSTRING('abc', 0), SUBSTRING('abc', 2), MID('abc', -2, 1), SUBSTR('abc', 2, -1)",
            ["", "bc", "b", ""],
        ),
        (
            "SELECT LEFT(RIGHT('abc', 2), 1), LENGTH(LEFT('éa', 1)), IF(IF('a' = 'A', 'b', 'c') = 'B', 1, 0)",
            ["b", 2, 1],
        ),
        ("SELECT 'a' = 'A' COLLATE utf8_bin, 'a' COLLATE utf8_bin IN ('A'), 'a' = 'A' COLLATE utf8_ci", [0, 0, 1]),
        ("SELECT CAST(CAST('1.26' AS DECIMAL(5, 1)) AS DECIMAL(5, 2))", [1.3]),
        ("SELECT YEAR(founded), DATEDIFF(founded, '2001-05-01') FROM `2nd league` LIMIT 1", [2001, 29]),
        ("SELECT STR_TO_DATE('May 3, 2020', '%M %d, %Y')", ["2020-05-03"]),
        ("SELECT DATE_ADD('2020-01-31', INTERVAL 1 MONTH)", ["2020-02-29"]),
        ("SELECT 7 / 2, 7 DIV 2, TRUNCATE(2.79, 1), CAST('2.346' AS DECIMAL(5, 2))", [3.5, 3, 2.7, 2.35]),
        ("SELECT FORMAT(1234.5, 1), '12 kg' + 1, 'x' + 1", ["1,234.5", 13, 1]),
        ("SELECT 'abc' REGEXP '^A.c$', LENGTH('é'), CHAR_LENGTH('é'), BINARY 'a' = 'A', 'a' = 'Á'", [1, 2, 1, 0, 1]),
        ("SHOW TABLES", ["2nd league"]),
        ("SELECT COUNT(*) FROM (SELECT 1 # a comment\n) x -- another", [1]),
    ],
)  # fmt: skip
def test_statements_mean_what_they_mean_in_mysql(database: Any, query: str, expected: list[Any]) -> None:
    assert selected(database, query) == expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE `2nd league` SET Points = Points + 1 WHERE `1st name` = 'O\\'Neil'", "10.5"),
        ("UPDATE `2nd league` SET Points = 30.0 * 1 WHERE Points = 9.5", "30"),
        ('UPDATE `2nd league` SET Points = 5.50 WHERE `1st name` = "O\'Neil"', "5.50"),
        ("UPDATE `2nd league` SET Points = 007 ORDER BY `1st name` DESC LIMIT 3", "7"),
    ],
)
def test_numbers_are_stored_as_mysql_writes_them(database: Any, statement: str, expected: str) -> None:
    assert database.execute(statement).startswith("OK, ")
    assert selected(database, "SELECT Points FROM `2nd league` WHERE `1st name` LIKE 'O%'") == [expected]
    assert selected(database, "SELECT Points FROM `2nd league` WHERE `1st name` LIKE '50%'") == ["1,200"]


def test_a_name_that_no_column_has_is_an_error(database: Any) -> None:
    with pytest.raises(SqlError, match="no such column"):
        database.execute("SELECT `no such` FROM `2nd league`")


def test_changes_are_counted_and_several_statements_refused(database: Any) -> None:
    assert database.execute("INSERT INTO `2nd league` VALUES (1, 2, NULL), ('a', 'b', TRUE)") == "OK, 2 rows changed"
    assert database.execute("DELETE FROM `2nd league` WHERE founded IS NULL LIMIT 1") == "OK, 1 row changed"
    with pytest.raises(SqlError, match="exactly one"):
        database.execute("SELECT 1; DROP TABLE `2nd league`")
    assert selected(database, "SELECT COUNT(*) FROM `2nd league`") == [5]


# Hostile statements

LOOP = "WITH RECURSIVE c(x) AS (SELECT {first} UNION ALL SELECT x FROM c) SELECT {what} FROM c"
HOSTILE = [
    "ATTACH DATABASE '{folder}/evil.db' AS e",
    "VACUUM INTO '{folder}/evil.db'",
    "SELECT * FROM `2nd league` INTO OUTFILE '{folder}/evil.txt'",
    "SELECT LOAD_FILE('{folder}/secret')",
    "SELECT readfile('{folder}/secret')",
    "SELECT load_extension('{folder}/secret')",
    "PRAGMA writable_schema = 1",
    "SELECT * FROM pragma_database_list",
    "DELETE FROM sqlite_master",
    "CREATE VIRTUAL TABLE v USING fts5(a)",
    "SELECT zeroblob(1000000000)",
    "SELECT printf('%.*c', 1000000000, 'x')",
    "SELECT REPEAT('a', 1000000000)",
    "SELECT REPLACE(REPEAT('a', 99999), 'a', REPEAT('b', 99999))",
    "SELECT REGEXP_REPLACE(REPEAT('a', 99999), 'a', REPEAT('b', 99999))",
    LOOP.format(first="1", what="COUNT(*)"),
    LOOP.format(first="REPEAT('a', 90000)", what="COUNT(*)"),
    "CREATE TABLE big AS " + LOOP.format(first="REPEAT('a', 90000)", what="*"),
    "SELECT COUNT(*) FROM " + ", ".join(f"`2nd league` t{number}" for number in range(16)),
    "SELECT 'a' LIKE REPEAT('%a', 49999)",
    "SELECT REPEAT('x', 3000) REGEXP '(x+x+)+y'",
    "SELECT " + "BINARY(" * 28 + "1" + ")" * 28,
    "SELECT " + "JOIN a " * 60,
    "SELECT " + "(" * 4000,
    "SELECT 1" + " + 1" * 2400,
    "SELECT '\ud800'",
    "SELECT RAND()",
    "SELECT NOW()",
    "SELECT @x",
    "SELECT ?",
    "\x00",
    "",
    "x" * 20_000,
]


def briefly(database: SqliteDatabase, query: str, seconds: float = 0.2) -> None:
    """Execute a statement with a time limit that the others, on a busy machine, might exceed."""
    usual, database._seconds = database._seconds, seconds
    try:
        database.execute(query)
    finally:
        database._seconds = usual


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_statements_are_refused_or_stopped(number: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    database = SqliteDatabase([TEAMS], 30.0)
    begun = time.monotonic()
    with pytest.raises(SqlError) as error:
        briefly(database, HOSTILE[number].replace("{folder}", str(tmp_path)), 0.5)
    assert time.monotonic() - begun < 100
    assert "secret" not in str(error.value).replace(str(tmp_path), "")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert selected(database, "SELECT COUNT(*) FROM `2nd league`") == [4], "the database can still be used"


def test_slow_matching_is_bounded() -> None:
    database = SqliteDatabase([TEAMS], 15.0)
    assert selected(database, "SELECT REPEAT('a', 90000) LIKE CONCAT(REPEAT('%a', 900), 'b')") == [0]


def many(times: int, expression: str) -> str:
    """Return a statement with the sum of an expression's values; ``{}`` in it is the number of the term."""
    return "SELECT " + " + ".join(f"({expression.replace('{}', str(number))})" for number in range(times))


TRIM = "SELECT TRIM(BOTH CONCAT(REPEAT('b', 8000), 'c') FROM REPEAT('c', 99999))"
SLOW = {
    "texts compared with a pattern": many(100, "REPEAT('a', 49990) LIKE CONCAT('%', REPEAT('a', 998), 'b')"),
    "regular expressions": many(100, "REPEAT('x', 3000) REGEXP '(x+x+)+y'"),
    "approximate expressions": f"SELECT REPEAT('ab', 40000) REGEXP '(?:{'abcdefgh' * 20}){{e<=60}}'",
    "texts found in others": many(150, "INSTR(REPEAT('ab', 49999), CONCAT(REPEAT('ab', 24000), 'c'))"),
    "patterns of dates": many(60, "STR_TO_DATE('1', CONCAT(REPEAT(' %% ', 20000), '{}')) = 1"),
    "one call of SQLite's own": TRIM,
    "such a call in a change": f"INSERT INTO `2nd league` {TRIM}, 1, 1",
    "such a call in a condition": f"DELETE FROM `2nd league` WHERE `1st name` = ({TRIM})",
}


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.long_after(1)
def test_the_time_of_a_statement_is_bounded_within_functions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_worker, "WATCH_SECONDS", 250.0)  # the worker ends itself
    database = SqliteDatabase([TEAMS], 30.0)
    database.execute("UPDATE `2nd league` SET Points = 77 WHERE `1st name` = 'ADA'")
    begun = time.monotonic()
    with pytest.raises(SqlError, match="takes too long"):
        briefly(database, SLOW[kind])
    assert time.monotonic() - begun < 100
    assert selected(database, "SELECT Points FROM `2nd league` WHERE `1st name` = 'ADA'") == ["77"]
    assert selected(database, "SELECT COUNT(*) FROM `2nd league`") == [4]


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_worker, "_WORKERS", [sql_worker._Worker()])


def test_a_statement_that_is_killed_costs_other_episodes_nothing(one_worker: None) -> None:
    mine, other = SqliteDatabase([TEAMS], 30.0), SqliteDatabase([TEAMS], 30.0)
    for statement in ("DELETE FROM `2nd league` WHERE Points > 9", "CREATE TABLE more (a TEXT)"):
        other.execute(statement)
    other.execute("WITH new AS (SELECT 'x' AS a) SELECT * FROM new")
    before = other.state([TEAMS])
    with pytest.raises(SqlError, match="takes too long"):
        briefly(mine, TRIM)
    assert other.state([TEAMS]) == before != mine.state([TEAMS])
    assert selected(other, "SHOW TABLES") == ["2nd league", "more"]


def test_nothing_of_a_statement_is_printed(one_worker: None, capfd: pytest.CaptureFixture[str]) -> None:
    """sqlglot warns of statements that it cannot read, with their text, which may hold a terminal's commands."""
    with pytest.raises(SqlError, match="not executed here"):
        SqliteDatabase([TEAMS], 30.0).execute("DROP \x1b[2J LEFT")
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_stands_still_is_killed(one_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_worker, "WATCH_SECONDS", 0.2)
    database = SqliteDatabase([TEAMS], 30.0)
    os.kill(database._worker._process.pid, signal.SIGSTOP)
    with pytest.raises(SqlError, match="takes too long"):
        briefly(database, "SELECT 1")
    assert selected(database, "SELECT COUNT(*) FROM `2nd league`") == [4]


def test_a_worker_that_dies_between_statements_is_replaced() -> None:
    database = SqliteDatabase([TEAMS], 30.0)
    database.execute("DELETE FROM `2nd league` WHERE Points > 9")
    left = selected(database, "SELECT COUNT(*) FROM `2nd league`")
    os.kill(database._worker._process.pid, signal.SIGKILL)
    database._worker._process.wait()
    assert selected(database, "SELECT COUNT(*) FROM `2nd league`") == left


def test_tables_that_cannot_be_filled_again_fail_the_agent_and_not_the_episode() -> None:
    database = SqliteDatabase([TEAMS], 0.3)
    database._changes.append(f"INSERT INTO `2nd league` {TRIM}, 1, 1")  # as if it had just been fast enough
    with pytest.raises(SqlError, match="takes too long"):
        database.execute(TRIM)
    with mock.patch.object(database._worker, "start", wraps=database._worker.start) as started:
        for _ in range(10):
            with pytest.raises(SqlError, match="the tables are lost"):
                database.execute("SELECT 1")
    started.assert_called_once()
    database.close()


def test_a_forked_process_has_workers_of_its_own() -> None:
    """In its own process: this one may have threads of other tests, whose locks a fork would keep."""
    program = f"""
import os
from mrlm_environments.sql.worker import SqliteDatabase
database = SqliteDatabase([{TEAMS!r}], 30.0)
database.execute("DELETE FROM `2nd league` WHERE Points > 9")
child = os.fork()
if child == 0:
    database.execute("DELETE FROM `2nd league`")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(database.execute("SELECT COUNT(*) FROM `2nd league`"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[(2,)]", done.stderr


def test_databases_are_let_go(one_worker: None) -> None:
    for _ in range(3):
        database = SqliteDatabase([TEAMS], 30.0)
        worker = database._worker
        assert len(worker.databases) == 1
        database.close()
        database.close()
    del database
    SqliteDatabase([TEAMS], 30.0)  # dropped without being closed
    gc.collect()
    assert not worker.databases


def test_one_row_of_a_result_is_bounded() -> None:
    shown = SqliteDatabase([TEAMS], 30.0).execute("SELECT " + ", ".join(["REPEAT('😀', 24000)"] * 60))
    assert len(shown) < 25_000


def test_steps_are_counted_for_each_execution_of_a_statement() -> None:
    half = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 600000) SELECT COUNT(*) FROM c"
    database = MemoryDatabase([TEAMS])
    assert [database.execute(half) for _ in range(3)] == [("[(600000,)]", False)] * 3
    with pytest.raises(SqlError, match="takes too long"):
        database.execute(half.replace("600000", "2000000"))


def test_memory_is_bounded() -> None:
    other = SqliteDatabase([TEAMS], 30.0)
    with pytest.raises(SqlError, match="memory"):
        SqliteDatabase([TEAMS], 30.0).execute(
            "CREATE TABLE big AS " + LOOP.format(first="REPEAT('a', 90000)", what="*")
        )
    with pytest.raises(SqlError, match="too large"):
        state_rows([("a" * 1_000_000,)] * 30)
    assert selected(other, "SELECT COUNT(*) FROM `2nd league`") == [4]


def test_a_server_through_sqlite_is_fenced_in_too(tmp_path: Path) -> None:
    database = SqliteServer("sqlite://", [TEAMS], 0.5)
    for number in (0, 6, 10, 15):
        with pytest.raises(SqlError):
            database.execute(HOSTILE[number].replace("{folder}", str(tmp_path)))
    assert not list(tmp_path.iterdir())
    database.close()


def test_escapes_and_texts_in_double_quotes_are_translated() -> None:
    connection = sqlite3.connect(":memory:")
    assert connection.execute(sqlite_statement("SELECT 'a\\nb', \"x\", 1e3")).fetchall() == [("a\nb", "x", 1000.0)]
