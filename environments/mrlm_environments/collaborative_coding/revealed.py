"""Assertions that are taken out of a task's tests, to be shown to agents and never to be graded."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Mapping
from typing import Any

from mrlm_environments.code.rows import context_of, entry_of, tests_of
from mrlm_pl.sandbox import bound_names

CHECK = "check"


def hold_out(data: Mapping[str, Any], count: int) -> tuple[dict[str, Any], list[str]]:
    """Return the task with at most ``count`` assertions fewer, and these, each of which stands for itself.

    The first ones are taken, of those that call the task's function and need nothing that the tests compute around
    them. Equal assertions leave the tests with them; at least one other that calls the function stays.
    """
    entry, names = entry_of(data), set(tests_of(data).required())
    known = names | set(dir(builtins)) | bound_names(context_of(data))
    trees = {tree: _argument(tree) for tree in map(ast.parse, data["tests"])}
    calling: dict[ast.Assert, str] = {}
    for tree, candidate in trees.items():
        asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        calling |= {node: _standalone(node, candidate, entry) for node in asserts if _read(node) & {*names, candidate}}
    revealed: dict[str, None] = {}
    for tree, candidate in trees.items():
        around = bound_names(ast.unparse(tree)) - {candidate}  # names that a single assertion does not have
        for node in _own(tree):
            read = _read(node) - bound_names(ast.unparse(node))  # its own names, in comprehensions and lambdas
            alone = read <= {*known, candidate} and not read & around
            text = calling.get(node)
            if len(revealed) < count and alone and text and set(calling.values()) - {*revealed, text}:
                revealed[text] = None
    left_out = {node for node, text in calling.items() if text in revealed}
    for tree in trees:
        _LeaveOut(left_out).visit(tree)
    left = [ast.unparse(tree) for tree in trees if not all(isinstance(node, ast.Pass) for node in tree.body)]
    return {**data, "tests": left if left_out else data["tests"]}, list(revealed)


class _LeaveOut(ast.NodeTransformer):
    """Puts ``pass`` in the place of assertions."""

    def __init__(self, assertions: Collection[ast.Assert]) -> None:
        self.assertions = assertions

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return ast.Pass() if node in self.assertions else node


def _read(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _check_of(tree: ast.Module) -> ast.FunctionDef | None:
    """Return a file's function ``check`` with an argument."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECK)
    return next((node for node in functions if node.args.args), None)


def _own(tree: ast.Module) -> list[ast.Assert]:
    """Return the assertions at a file's or ``check``'s own level."""
    check = _check_of(tree)
    found = [node for node in (*tree.body, *(check.body if check else ())) if isinstance(node, ast.Assert)]
    return sorted(found, key=lambda node: node.lineno)


def _argument(tree: ast.Module) -> str:
    check = _check_of(tree)
    return check.args.args[0].arg if check else ""


def _standalone(node: ast.Assert, candidate: str, entry: str) -> str:
    """Return the assertion without its message, with the function by its name."""
    copied = ast.parse(ast.unparse(node.test), mode="eval").body
    for name in ast.walk(copied):
        if isinstance(name, ast.Name) and name.id == candidate:
            name.id = entry
    return f"assert {ast.unparse(copied)}"
