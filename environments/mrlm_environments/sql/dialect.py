"""MySQL statements as SQLite understands them, so that text, numbers and quoting behave as they would in MySQL.

sqlglot translates the statement; parts that it leaves unchanged although SQLite reads them differently are mended in
the syntax tree. The functions that the result calls are in :mod:`mrlm_environments.sql.functions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import sqlglot
from sqlglot import exp
from sqlglot.dialects.mysql import MySQL
from sqlglot.dialects.sqlite import SQLite

from mrlm_environments.sql.functions import COLLATION

MAX_QUERY_CHARACTERS = 10_000
MAX_STEPS = 30_000
"""Tokens that sqlglot may read of a statement, counting those that it reads again after a wrong guess. Its guesses can
double with each level of nesting, so that a hundred characters would keep it busy for hours."""

COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In)
NUMBERS = (
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Boolean, exp.Predicate, exp.Not, exp.Escape),
    *(exp.Count, exp.Sum, exp.Avg, exp.Length, exp.StrPosition, exp.Abs, exp.Round, exp.Floor, exp.Ceil, exp.Sqrt),
    *(exp.Pow, exp.Sign, exp.Year, exp.Month, exp.Day, exp.DateDiff, exp.RowNumber, exp.Rank, exp.DenseRank),
)
OF_FIRST_ARGUMENT = (exp.Paren, exp.Neg, exp.Alias, exp.Max, exp.Min, exp.Coalesce, exp.Greatest, exp.Least, exp.Window)
STATEMENTS = (
    *(exp.Query, exp.Insert, exp.Update, exp.Delete, exp.Create, exp.Alter, exp.Drop, exp.TruncateTable),
    *(exp.Show, exp.Describe),
)
_FIRST_WORDS = "( SELECT WITH INSERT UPDATE DELETE CREATE ALTER DROP TRUNCATE SHOW DESCRIBE DESC EXPLAIN"
FIRST_WORDS = frozenset(_FIRST_WORDS.split())
Node: TypeAlias = Any
"""A node of sqlglot's syntax tree; their common class has changed its name between releases."""


class SqlError(Exception):
    """A statement that is rejected or fails; the text is for the agent."""


class BoundedMySQL(MySQL):
    """MySQL, whose reader gives up after :data:`MAX_STEPS`."""

    class Parser(MySQL.Parser):  # type: ignore[misc, valid-type]  # set by sqlglot's metaclass
        """As MySQL's; it counts the tokens that it reads."""

        steps = 0

        def _advance(self, times: int = 1) -> None:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise SqlError("the statement is nested too deeply")
            super()._advance(times)


class BackticksSQLite(SQLite):
    """SQLite with names in back-ticks: a name in double quotes that no column has would be taken for a text."""

    class Tokenizer(SQLite.Tokenizer):
        """As SQLite's; names are written with the first of these."""

        IDENTIFIERS = ["`", '"', ("[", "]")]  # noqa: RUF012  # sqlglot's own form


def sqlite_statement(query: str) -> str:
    """Return the SQLite statement that does what one MySQL statement does.

    Raises:
        SqlError: it is not a single statement, cannot be read, or is of a kind that is not supported.

    >>> sqlite_statement("SELECT 1st FROM t WHERE `a b` = 'it\\\\'s' AND n > 5")
    "SELECT `1st` FROM `t` WHERE `a b` COLLATE mysql = 'it''s' AND CAST(`n` AS REAL) > 5"
    >>> sqlite_statement('UPDATE t SET a = 5.50 LIMIT 1')
    "UPDATE `t` SET `a` = '5.50' WHERE rowid IN (SELECT rowid FROM `t` LIMIT 1)"
    """
    if len(query) > MAX_QUERY_CHARACTERS:
        raise SqlError(f"the statement has {len(query)} characters; {MAX_QUERY_CHARACTERS} are allowed")
    try:
        tokens = sqlglot.tokenize(query, read="mysql")
        if tokens and tokens[0].text.upper() not in FIRST_WORDS:
            raise SqlError(f"{tokens[0].text[:40]} statements are not executed here; each statement commits itself")
        trees = [tree for tree in sqlglot.parse(query, read=BoundedMySQL) if tree is not None]
        if len(trees) != 1:
            raise SqlError("give exactly one statement" if trees else "the statement is empty")
        return _sql_text(trees[0])
    except SqlError:
        raise
    except RecursionError:
        raise SqlError("the statement is nested too deeply") from None
    except sqlglot.errors.SqlglotError as error:
        raise SqlError(f"the statement cannot be read: {_first_fault(error)}") from None
    except Exception as error:  # on texts that are no SQL, sqlglot also fails with errors of many unrelated classes
        raise SqlError(f"the statement cannot be read ({type(error).__name__})") from None


def _first_fault(error: Exception) -> str:
    found = getattr(error, "errors", None) or [{}]
    return found[0].get("description") or str(error).splitlines()[0]


def _sql_text(tree: Node) -> str:
    if not isinstance(tree, STATEMENTS):
        raise SqlError("statements of this form are not executed here")
    if isinstance(tree, (exp.Show, exp.Describe)):
        return _information(tree)
    if isinstance(tree, exp.TruncateTable):
        tree = exp.Delete(this=tree.expressions[0])
    if isinstance(tree, exp.Create):
        tree.set("properties", None)
    if isinstance(tree, exp.Insert):
        tree.set("conflict", None)  # ON DUPLICATE KEY: the tables of the tasks have no key
    _mend_functions(tree)
    _mend_stored_numbers(tree)
    _mend_comparisons(tree)
    _mend_limited_changes(tree)
    return tree.sql(
        BackticksSQLite, identify=True, comments=False, unsupported_level=sqlglot.ErrorLevel.RAISE, normalize=False
    )


def _information(tree: Node) -> str:
    name = tree.args.get("target") if isinstance(tree, exp.Show) else tree.this
    if isinstance(tree, exp.Show) and tree.name.upper() == "TABLES":
        return "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
    if isinstance(name, exp.Table) or (isinstance(tree, exp.Show) and tree.name.upper() == "COLUMNS" and name):
        return f"SELECT name, type FROM pragma_table_info({exp.Literal.string(name.name).sql('sqlite')})"
    raise SqlError("of this kind only SHOW TABLES, SHOW COLUMNS FROM a table and DESCRIBE a table can be executed")


def _is_number(node: Node, aliases: frozenset[str]) -> bool:
    """Return whether MySQL would compare this as a number, as far as its form tells; columns of the tasks hold text."""
    if isinstance(node, exp.Literal):
        return not node.is_string
    if isinstance(node, OF_FIRST_ARGUMENT):
        return _is_number(node.this, aliases)
    if isinstance(node, exp.Cast):
        return node.to.this in exp.DataType.NUMERIC_TYPES
    if isinstance(node, exp.Column):
        return node.name.lower() in aliases
    if isinstance(node, (exp.Subquery, exp.Select)):
        return _is_number(next(iter(node.selects), None), aliases)
    if isinstance(node, (exp.If, exp.Case)):
        branch = node if isinstance(node, exp.If) else node.args["ifs"][0]
        return _is_number(branch.args.get("true"), aliases)
    if isinstance(node, exp.Anonymous):
        return node.name.upper() in ("TRUNCATE", "OCTET_LENGTH")
    return isinstance(node, NUMBERS)


def _enclose(node: Node) -> Node:
    return node.copy() if isinstance(node, (exp.Column, exp.Paren, exp.Literal)) else exp.Paren(this=node.copy())


def _mend_comparisons(tree: Node) -> None:
    """Compare with a number by value, and two texts without regard to case and accents."""
    numeric = (node for node in tree.find_all(exp.Alias) if _is_number(node.this, frozenset()) and node.alias)
    aliases = frozenset(node.alias.lower() for node in numeric)
    for node in _inner_first(tree, *COMPARISONS):
        if isinstance(node.parent, exp.Update) and node.arg_key == "expressions":
            continue
        others = [node.args[key] for key in ("expression", "low", "high", "query") if node.args.get(key)]
        others += node.expressions if isinstance(node, exp.In) else []
        if not any(_is_number(part, aliases) for part in (node.this, *others)):
            collates = any(isinstance(part, exp.Collate) for part in (node.this, *others))
            if not collates and not isinstance(node.this, (exp.Tuple, exp.Null)):
                collated = exp.Collate(this=_enclose(node.this), expression=exp.Var(this=COLLATION))
                node.this.replace(collated)
            continue
        for part in (node.this, *others):
            if not _is_number(part, aliases) and not isinstance(part, (exp.Query, exp.Null)):
                part.replace(exp.cast(part.copy(), "DOUBLE"))


def _mend_functions(tree: Node) -> None:
    """Call this package's functions, round DECIMAL(p, s) to s digits, and reduce MySQL's collations to two.

    BINARY compares byte by byte; LIKE compares without case and accents.
    """
    for node in _inner_first(tree, exp.Left, exp.Right, exp.Trunc, exp.Length, exp.Like, exp.Cast, exp.Collate):
        if isinstance(node, (exp.Left, exp.Right)):  # words of SQLite's joins, which cannot be called
            node.replace(_call(f"TEXT_{node.key.upper()}", node.this, node.expression))
        elif isinstance(node, exp.Trunc):
            node.replace(_call("TRUNCATE", node.this, node.args.get("decimals") or exp.Literal.number(0)))
        elif isinstance(node, exp.Length) and node.args.get("binary"):
            node.replace(_call("OCTET_LENGTH", node.this))
        elif isinstance(node, exp.Like):
            backslash, escape = exp.Literal.string("\\"), node.parent
            node.set("this", _call("FOLDED", node.this))
            if isinstance(escape, exp.Escape):
                node.set("expression", _call("LIKE_PATTERN", node.expression, escape.expression))
                escape.set("expression", backslash)
            else:
                node.set("expression", _call("LIKE_PATTERN", node.expression, backslash))
                node.replace(exp.Escape(this=node.copy(), expression=backslash))
        elif isinstance(node, exp.Collate):
            binary = node.expression.name.lower().endswith("bin")
            node.set("expression", exp.Var(this="BINARY" if binary else COLLATION))
        elif isinstance(node, exp.Cast) and node.to.this in (exp.DataType.Type.BINARY, exp.DataType.Type.VARBINARY):
            node.replace(exp.Collate(this=_enclose(node.this), expression=exp.Var(this="BINARY")))
        elif isinstance(node, exp.Cast) and node.to.this == exp.DataType.Type.DECIMAL:
            digits = node.to.expressions[1].name if len(node.to.expressions) > 1 else "0"
            real = exp.cast(node.this.copy(), "DOUBLE")
            node.replace(exp.Round(this=real, decimals=exp.Literal.number(digits)))


def _inner_first(tree: Node, *kinds: Any) -> Iterator[Node]:
    """Yield the nodes of some kinds; inner ones first, since what replaces a node has copies of its parts."""
    return reversed(list(tree.find_all(*kinds)))


def _call(name: str, *arguments: Node) -> Node:
    """Return a call of a function of this package."""
    return exp.Anonymous(this=name, expressions=[argument.copy() for argument in arguments])


def _mend_stored_numbers(tree: Node) -> None:
    """Write numbers that are stored as text as MySQL does: 5.50 stays, the result 31.0 becomes 31."""
    stored: list[Node] = []
    if isinstance(tree, exp.Update):
        stored = [pair.expression for pair in tree.expressions if isinstance(pair, exp.EQ)]
    elif isinstance(tree, exp.Insert) and isinstance(tree.expression, exp.Values):
        stored = [value for row in tree.expression.expressions for value in row.expressions]
    elif isinstance(tree, exp.Insert) and isinstance(tree.expression, exp.Select):
        stored = list(tree.expression.selects)
    for node in stored:
        value = node.unalias() if isinstance(node, exp.Alias) else node
        sign, digits = ("-", value.this) if isinstance(value, exp.Neg) else ("", value)
        if isinstance(digits, exp.Literal) and not digits.is_string and "e" not in digits.name.lower():
            whole, point, fraction = digits.name.partition(".")
            value.replace(exp.Literal.string(sign + (whole.lstrip("0") or "0") + point + fraction))
        elif _is_number(value, frozenset()):
            value.replace(_call("NUMBER_TEXT", value))


def _mend_limited_changes(tree: Node) -> None:
    """Make UPDATE and DELETE with ORDER BY or LIMIT change the rows that a SELECT finds."""
    if not isinstance(tree, (exp.Update, exp.Delete)):
        return
    if tree.args.get("tables") or tree.args.get("using") or (tree.this and tree.this.args.get("joins")):
        raise SqlError("UPDATE and DELETE of several tables cannot be executed here; use a subquery")
    if not (tree.args.get("limit") or tree.args.get("order")):
        return
    # SQLite's name of a row's number; quoted like a column it would mean the same.
    row = exp.Var(this="rowid")
    chosen = exp.Select(expressions=[row.copy()]).from_(tree.this.copy())
    for part in ("where", "order", "limit"):
        chosen.set(part, tree.args.get(part))
        tree.set(part, None)
    tree.set("where", exp.Where(this=exp.In(this=row, query=exp.Subquery(this=chosen))))
