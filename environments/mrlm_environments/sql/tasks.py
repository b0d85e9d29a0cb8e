"""Tasks about tables: generated ones, and rows of AgentBench's DBBench.

A task's data has ``question``, ``tables`` (each with ``name``, ``columns`` and ``rows`` of texts), ``kind``,
``answers`` (of a question), ``state`` (the hash after a change, "" for a question) and ``statements``, which do what is
asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal, get_args

from mrlm_environments.sql.scoring import state_hash
from mrlm_pl.errors import DataError

Kind = Literal["select", "count", "max", "sum", "order", "insert", "update", "delete"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROW_FORM = "{description, type, label or answer_md5, table: {table_name, table_info: {columns: [{name}], rows}}}"
CHANGES = ("INSERT", "UPDATE", "DELETE")

SUBJECTS = tuple(
    (name, tuple(columns.split(", ")), tuple(names.split()), tuple(groups.split()))
    for name, columns, names, groups in (
        ("staff", "name, city, age, pay", "Ada Ben Eva Ida Kim Leo Mia Sam Tom Uma", "Oslo Rome Bonn"),
        ("books", "title, genre, pages, copies sold", "Ash Bay Dusk Echo Fern Gale Iris Moon", "art law"),
        ("2nd hand cars", "model, maker, stock, price", "A1 B2 C3 D4 E5 F6 G7 H8", "Alto Brio Cito"),
    )
)
"""Name of the table, its columns (a name, a group, two numbers), and values of the first two."""

Row = list[str]
Drawn = tuple[str, list[Any], list[Row] | None, str]
"""A question, its answers, the rows after a change (None for a question), and a statement that does it."""


def generated_task(rng: Random, kinds: Sequence[Kind], rows: tuple[int, int]) -> dict[str, Any]:
    """Return a small table and a question about it, or a change of it.

    Args:
        rng: source of all choices.
        kinds: kinds of questions to choose from.
        rows: least and most rows of the table.
    """
    name, columns, names, groups = rng.choice(SUBJECTS)
    chosen = rng.sample(names, min(len(names), rng.randint(*rows)))
    content = [[one, rng.choice(groups), str(rng.randint(1, 99)), str(rng.randint(1, 9) * 100)] for one in chosen]
    table = {"name": name, "columns": list(columns), "rows": content}
    kind = rng.choice(list(kinds))
    question, answers, after, statement = _draw_question(rng, kind, table, groups)
    return {
        "question": f"{question}\n{_describe_tables([table])}",
        "tables": [table],
        "kind": kind,
        "answers": answers,
        "state": "" if after is None else state_hash([after]),
        "statements": [statement],
        "key": question,
    }


def _describe_tables(tables: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"Table `{table['name']}`, columns {', '.join(table['columns'])}." for table in tables)


def _draw_question(rng: Random, kind: Kind, table: Mapping[str, Any], groups: Sequence[str]) -> Drawn:
    """Return a question of a kind, or a change, with what is asked for.

    In statements, ``+ 0`` makes MySQL compare numbers, not texts.
    """
    columns, rows = table["columns"], table["rows"]
    source, *quoted = (f"`{name}`" for name in (table["name"], *columns))
    if kind == "select":
        row, column = rng.choice(rows), rng.randint(1, 3)
        statement = f"SELECT {quoted[column]} FROM {source} WHERE {quoted[0]} = '{row[0]}'"
        return f"What is the {columns[column]} of {row[0]}?", [row[column]], None, statement
    if kind == "count":
        column, bound = rng.choice(((2, rng.randint(10, 90)), (3, rng.randint(2, 8) * 100)))
        statement = f"SELECT COUNT(*) FROM {source} WHERE {quoted[column]} > {bound}"
        count = sum(int(row[column]) > bound for row in rows)
        return f"How many rows have {columns[column]} above {bound}?", [count], None, statement
    if kind == "insert":
        values = rng.choice(("Zoe", "Zed", "Z9")), rng.choice(groups), rng.randint(1, 99), rng.randint(1, 9) * 100
        condition = ", ".join(f"{column} {value}" for column, value in zip(columns, values, strict=True))
        after = [*rows, list(map(str, values))]
        return f"Add a row: {condition}.", [], after, f"INSERT INTO {source} VALUES {values}"
    if kind == "update":
        group, amount = rng.choice(rows)[1], rng.randint(1, 9)
        after = [[*row[:2], str(int(row[2]) + amount), row[3]] if row[1] == group else row for row in rows]
        statement = f"UPDATE {source} SET {quoted[2]} = {quoted[2]} + {amount} WHERE {quoted[1]} = '{group}'"
        return f"Add {amount} to {columns[2]} where {columns[1]} is {group}.", [], after, statement
    if kind == "delete":
        bound = int(rng.choice(rows)[2])
        after = [row for row in rows if int(row[2]) < bound]
        statement = f"DELETE FROM {source} WHERE {quoted[2]} >= {bound}"
        return f"Remove all rows with {columns[2]} of {bound} or more.", [], after, statement
    column, other = rng.choice(((2, 3), (3, 2)))
    bound = int(rng.choice(rows)[other])
    matching_rows = [row for row in rows if int(row[other]) <= bound]
    where = f"FROM {source} WHERE {quoted[other]} <= {bound}"
    if kind == "order":
        # Equal numbers would leave the order open, so the first column decides between them.
        matching_rows.sort(key=lambda row: (-int(row[column]), row[0]))
        count = rng.randint(1, min(3, len(matching_rows)))
        question = (
            f"Of the rows with {columns[other]} of {bound} or less, which {count} {columns[0]} have the highest "
            f"{columns[column]} (among equal ones the first by alphabet)?"
        )
        order = f"ORDER BY {quoted[column]} + 0 DESC, {quoted[0]} LIMIT {count}"
        return question, [row[0] for row in matching_rows[:count]], None, f"SELECT {quoted[0]} {where} {order}"
    word, of = ("highest", max) if kind == "max" else ("total", sum)
    question = f"What is the {word} {columns[column]} where {columns[other]} is {bound} or less?"
    answer = of(int(row[column]) for row in matching_rows)
    return question, [answer], None, f"SELECT {kind.upper()}({quoted[column]} + 0) {where}"


def dbbench_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task of a DBBench row with ``description``, ``table``, ``type`` and ``label`` or ``answer_md5``.

    Raises:
        DataError: a field is of another form; also :data:`~mrlm_pl.environment.rows.REFUSALS`: a field is missing.
    """
    listed = row["table"] if isinstance(row["table"], list) else [row["table"]]
    tables = [_dbbench_table(table) for table in listed]
    kind = row["type"][0] if isinstance(row["type"], list) and row["type"] else row["type"]
    label = row.get("label")
    if not isinstance(kind, str) or not isinstance(row["description"], str) or not tables:
        raise DataError("type must be a list of texts, description a text, and table hold a table")
    hashes = re.findall(r"\b[0-9a-f]{32}\b", str(row.get("answer_md5"))) if kind in CHANGES else []
    if kind in CHANGES and len(hashes) != len(tables):
        raise DataError(f"a row of type {kind} needs answer_md5, one hash for each table")
    if not hashes and not isinstance(label, list):
        raise DataError(f"a row of type {kind} needs label, the list of its answers")
    state = "_".join(sorted(hashes))
    extra = [str(row[name]) for name in ("evidence", "add_description") if row.get(name)]
    return {
        "question": "\n".join([row["description"], *(extra or [_describe_tables(tables)])]),
        "tables": tables,
        "kind": kind,
        "answers": [] if state else label,
        "state": state,
        "statements": [str(one) for one in label[:1]] if state and isinstance(label, list) else [],
    }


def _dbbench_table(table: Any) -> dict[str, Any]:
    info, name = table["table_info"], str(table["table_name"])
    columns = [str(column["name"]) for column in info["columns"]]
    # AgentBench creates every column as text and inserts str(value), whatever type the row names.
    rows = [[str(value) for value in row] for row in info["rows"]]
    if not columns or any(len(row) != len(columns) for row in rows):
        raise DataError(f"table {name!r} has {len(columns)} columns, but a row of another length")
    return {"name": name, "columns": columns, "rows": rows}
