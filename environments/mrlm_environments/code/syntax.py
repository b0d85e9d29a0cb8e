"""Groups of ``ast``'s classes, its errors, and a change of its trees."""

from __future__ import annotations

import ast

METHOD = (ast.FunctionDef, ast.AsyncFunctionDef)

BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of Python on text that is no program, or one nested too deep."""


def replace_node(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put a node in the place of another one of the tree, wherever that is."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list) and any(item is old for item in value):
                value[:] = [new if item is old else item for item in value]
