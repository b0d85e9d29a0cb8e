"""Groups of ``ast``'s classes, and its errors."""

from __future__ import annotations

import ast

METHOD = (ast.FunctionDef, ast.AsyncFunctionDef)

BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of Python on text that is not a program, or one nested too deep."""
