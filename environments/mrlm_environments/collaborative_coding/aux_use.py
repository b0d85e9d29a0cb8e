"""The use of another agent's helper ``aux`` by a main function, read from its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from mrlm_environments.code.syntax import BROKEN, METHOD
from mrlm_pl.sandbox.inside.grader import bound_by

AUX = "aux"
_SCOPES = (*METHOD, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class AuxUse:
    """The use of ``aux`` by a main function.

    Args:
        calls: whether it calls ``aux``, or hands it to another call.
        thin: whether it is a thin wrapper, which does no work of its own.
        ignores: whether it calls ``aux`` without using the value.
    """

    calls: bool
    thin: bool
    ignores: bool


def defines(code: str, name: str) -> bool:
    """Return whether code defines a function that returns a value.

    Of code that does not parse, a line ``def name(`` at the margin followed by an indented ``return`` is enough.

    >>> defines("def aux(x):\\n    return x", "aux"), defines("def aux(x):\\n    'return x'", "aux")
    (True, False)
    """
    try:
        found = function_of(ast.parse(code), name)
    except BROKEN:
        head = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}[ \t]*\(", code, re.MULTILINE)
        lines = code[head.start() :].splitlines()[1:] if head else []
        body = takewhile(lambda line: not line.strip() or line[:1] in (" ", "\t", ")"), lines)
        return any(re.match(r"[ \t]+return[ \t]+\S", line) for line in body)
    return found is not None and any(
        isinstance(node, ast.Return) and node.value is not None for node in own_nodes(found.body)
    )


def function_of(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the last function of a name at a file's top level."""
    return next((node for node in reversed(tree.body) if isinstance(node, METHOD) and node.name == name), None)


def without(code: str, name: str) -> str:
    """Return code without the top-level statements that bind a name; code that does not parse stays as it is.

    >>> without("aux = 3\\ndef f(x):\\n    return aux(x)", "aux")
    'def f(x):\\n    return aux(x)'
    """
    try:
        tree = ast.parse(code)
        kept = [node for node in tree.body if name not in _bound_names(node)]
        return code if len(kept) == len(tree.body) else ast.unparse(ast.Module(kept, []))
    except BROKEN:
        return code


def compiles(code: str) -> bool:
    """Return whether code is Python."""
    try:
        compile(code, "<program>", "exec", dont_inherit=True)
    except BROKEN:
        return False
    return True


def aux_use(code: str, name: str) -> AuxUse:
    """Return the use of ``aux`` by the named function, without code that cannot be reached; see ``AuxUse``.

    It calls ``aux`` where it calls the name, or gives it to another call (``map(aux, xs)``), and does not bind it
    itself. It ignores a value that is dropped by its statement, or only assigned to names that it never reads. It is
    thin where its body is a single ``return`` with ``aux`` in it, or where nothing but names, constants and calls of
    ``aux`` with such arguments is assigned and returned.
    """
    try:
        function = function_of(ast.parse(code), name)
        if function is None or AUX in _bound_inside(function):
            return AuxUse(False, False, False)
        body = _live(function.body)
        nodes = [node for stmt in body for node in ast.walk(stmt)]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        used = [parents.get(id(node)) for node in names if node.id == AUX]
        calls = [parent for parent in used if isinstance(parent, (ast.Call, ast.keyword))]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        direct = [call for call in calls if isinstance(call, ast.Call) and _is_aux(call.func)]
        ignores = any(_is_dropped(call, parents, read) for call in direct)
        thin = (len(body) == 1 and isinstance(body[0], ast.Return)) or all(map(_plain_statement, body))
        return AuxUse(bool(calls), bool(calls) and thin, ignores)
    except BROKEN:
        return AuxUse(False, False, False)


def _plain_statement(stmt: ast.stmt) -> bool:
    if isinstance(stmt, ast.Try):
        inner = [*stmt.body, *stmt.orelse, *stmt.finalbody, *(node for part in stmt.handlers for node in part.body)]
        return all(_plain_statement(node) for node in inner)
    if isinstance(stmt, ast.Assign):
        return all(isinstance(target, ast.Name) for target in stmt.targets) and _plain(stmt.value)
    if isinstance(stmt, (ast.AnnAssign, ast.Return, ast.Expr)):
        return stmt.value is None or _plain(stmt.value)
    return isinstance(stmt, (ast.Raise, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom))


def _plain(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _is_aux(node.func) and all(map(_plain, [*node.args, *(keyword.value for keyword in node.keywords)]))
    if isinstance(node, (ast.Starred, ast.NamedExpr)):
        return _plain(node.value)
    return isinstance(node, (ast.Name, ast.Constant))


def _is_dropped(call: ast.Call, parents: dict[int, ast.AST], read: set[str]) -> bool:
    """Return whether the value of a call is used by nothing."""
    node: ast.AST = call
    while (parent := parents.get(id(node))) is not None:
        if isinstance(parent, ast.Expr):
            return True
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            stored = [inner for target in targets for inner in ast.walk(target) if isinstance(inner, ast.expr)]
            names = {inner.id for inner in stored if isinstance(inner, ast.Name)}
            if any(isinstance(inner, (ast.Attribute, ast.Subscript)) for inner in stored) or names & read:
                return False
            if not isinstance(parent, ast.NamedExpr):
                return True
        elif isinstance(parent, (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.stmt)):
            return False
        node = parent
    return False


def _live(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that can be reached, without docstrings, ``pass`` and branches of constant conditions."""
    found: list[ast.stmt] = []
    for stmt in body:
        if isinstance(stmt, ast.Pass) or (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)):
            continue
        if isinstance(stmt, ast.If) and isinstance(stmt.test, ast.Constant):
            found += _live(stmt.body if stmt.test.value else stmt.orelse)
        elif isinstance(stmt, ast.While) and isinstance(stmt.test, ast.Constant) and not stmt.test.value:
            found += _live(stmt.orelse)
        else:
            for part in ("body", "orelse", "finalbody"):
                inner = getattr(stmt, part, None)
                if isinstance(inner, list) and inner:
                    setattr(stmt, part, _live(inner))
            found.append(stmt)
        if found and isinstance(found[-1], (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            break
    return found


def own_nodes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own body, not those of functions inside it."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def _bound_inside(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return names that a function binds: arguments, assignments, functions, imports."""
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    return arguments.union(*map(_bound_names, function.body), set())


def _bound_names(stmt: ast.stmt) -> set[str]:
    """Return names that a statement binds in its own scope."""
    return bound_by([stmt, *own_nodes([stmt])])


def _is_aux(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == AUX
