"""Environments and tools: one file each. They are imported when a name is used, and never bring torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrlm_environments.calculator import Calculator
    from mrlm_environments.class_completion import ClassCompletionEnvironment
    from mrlm_environments.code import CodeEnvironment
    from mrlm_environments.collaborative_coding import CollaborativeCodingEnvironment
    from mrlm_environments.coordination import CoordinationGame
    from mrlm_environments.file_system import FileSystem
    from mrlm_environments.math import MathEnvironment
    from mrlm_environments.mcp_tools import McpTools
    from mrlm_environments.sandboxed_tools import PythonRepl, Shell
    from mrlm_environments.shell import ShellEnvironment
    from mrlm_environments.sql import SqlEnvironment
    from mrlm_environments.tools import ToolEnvironment
    from mrlm_environments.web_search import WebSearch

__all__ = [
    "Calculator",
    "ClassCompletionEnvironment",
    "CodeEnvironment",
    "CollaborativeCodingEnvironment",
    "CoordinationGame",
    "FileSystem",
    "MathEnvironment",
    "McpTools",
    "PythonRepl",
    "Shell",
    "ShellEnvironment",
    "SqlEnvironment",
    "ToolEnvironment",
    "WebSearch",
]

_HOME = {
    "Calculator": "calculator",
    "ClassCompletionEnvironment": "class_completion",
    "CodeEnvironment": "code",
    "CollaborativeCodingEnvironment": "collaborative_coding",
    "CoordinationGame": "coordination",
    "FileSystem": "file_system",
    "MathEnvironment": "math",
    "McpTools": "mcp_tools",
    "PythonRepl": "sandboxed_tools",
    "Shell": "sandboxed_tools",
    "ShellEnvironment": "shell",
    "SqlEnvironment": "sql",
    "ToolEnvironment": "tools",
    "WebSearch": "web_search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
