"""Assertions that are taken out of a task's tests, to be shown to agents and never to be graded."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
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
    trees = [ast.parse(test) for test in data["tests"]]
    revealed: dict[str, str] = {}
    for tree in trees:
        around = bound_names(ast.unparse(tree)) - {_argument(tree)}  # what does not exist beside one assertion
        for node, candidate in _candidates(tree):
            read = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            read -= bound_names(ast.unparse(node))  # its own, in comprehensions and lambdas
            alone = read <= known | {candidate} and not read & around
            if len(revealed) < count and alone and read & (names | {candidate}):
                text = _standalone(node, candidate, entry)
                others = _texts(trees, entry, names) - {*revealed, text}
                if others:
                    revealed[text] = text
    if not revealed:
        return dict(data), []
    tests = [ast.unparse(_Without(set(revealed), entry).visit(tree)) for tree in trees]
    return {**data, "tests": [test for test in tests if test.strip()]}, list(revealed)


def _candidates(tree: ast.Module) -> Iterator[tuple[ast.Assert, str]]:
    """Yield the assertions at a file's or ``check``'s own level, with the name of ``check``'s argument or nothing."""
    for node in tree.body:
        if isinstance(node, ast.Assert):
            yield node, ""
        elif isinstance(node, ast.FunctionDef) and node.name == CHECK and node.args.args:
            for inner in node.body:
                if isinstance(inner, ast.Assert):
                    yield inner, node.args.args[0].arg


def _texts(trees: list[ast.Module], entry: str, names: set[str]) -> set[str]:
    """Return all assertions that call the task's functions, as they would stand for themselves."""
    found = set()
    for tree in trees:
        candidate = _argument(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                read = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                if read & (names | {candidate}):
                    found.add(_standalone(node, candidate, entry))
    return found


def _argument(tree: ast.Module) -> str:
    return next((name for _, name in _candidates(tree) if name), "")


def _standalone(node: ast.Assert, candidate: str, entry: str) -> str:
    """Return the assertion without its message, with the function by its name."""

    class Renamed(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.Name:
            return ast.Name(entry, name.ctx) if candidate and name.id == candidate else name

    copied = ast.parse(ast.unparse(node.test), mode="eval").body
    return f"assert {ast.unparse(Renamed().visit(copied))}"


class _Without(ast.NodeTransformer):
    """Leaves out assertions by their text, wherever they stand."""

    def __init__(self, texts: set[str], entry: str) -> None:
        self.texts, self.entry, self.candidate = texts, entry, ""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.candidate = _argument(node)
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST | None:
        return None if _standalone(node, self.candidate, self.entry) in self.texts else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node
