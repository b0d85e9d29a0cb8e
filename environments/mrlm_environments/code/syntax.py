"""What ``ast`` calls by several names."""

from __future__ import annotations

import ast

METHOD = (ast.FunctionDef, ast.AsyncFunctionDef)

BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What Python raises on text that is no program, or one nested too deep."""
