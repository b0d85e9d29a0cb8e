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
    from mrlm_environments.debate import DebateEnvironment
    from mrlm_environments.file_system import FileSystem
    from mrlm_environments.halves import Halves
    from mrlm_environments.kuhn_poker import KuhnPoker
    from mrlm_environments.language_model_judge import LanguageModelJudge
    from mrlm_environments.length_ratio import LengthRatioGame
    from mrlm_environments.math import MathEnvironment
    from mrlm_environments.mcp_tools import McpTools
    from mrlm_environments.reward_model_judge import RewardModelJudge
    from mrlm_environments.rule_judge import RuleJudge
    from mrlm_environments.sandboxed_tools import PythonRepl, Shell
    from mrlm_environments.shell import ShellEnvironment
    from mrlm_environments.sql import SqlEnvironment
    from mrlm_environments.text_generators import ChatEndpoint, ServedPolicy
    from mrlm_environments.tic_tac_toe import TicTacToe
    from mrlm_environments.tools import ToolEnvironment
    from mrlm_environments.web_search import WebSearch
    from mrlm_environments.word_emission import WordEmission
    from mrlm_environments.writing import WritingEnvironment

__all__ = [
    "Calculator",
    "ChatEndpoint",
    "ClassCompletionEnvironment",
    "CodeEnvironment",
    "CollaborativeCodingEnvironment",
    "CoordinationGame",
    "DebateEnvironment",
    "FileSystem",
    "Halves",
    "KuhnPoker",
    "LanguageModelJudge",
    "LengthRatioGame",
    "MathEnvironment",
    "McpTools",
    "PythonRepl",
    "RewardModelJudge",
    "RuleJudge",
    "ServedPolicy",
    "Shell",
    "ShellEnvironment",
    "SqlEnvironment",
    "TicTacToe",
    "ToolEnvironment",
    "WebSearch",
    "WordEmission",
    "WritingEnvironment",
]

_HOME = {
    "Calculator": "calculator",
    "ChatEndpoint": "text_generators",
    "ClassCompletionEnvironment": "class_completion",
    "CodeEnvironment": "code",
    "CollaborativeCodingEnvironment": "collaborative_coding",
    "CoordinationGame": "coordination",
    "DebateEnvironment": "debate",
    "FileSystem": "file_system",
    "LengthRatioGame": "length_ratio",
    "LanguageModelJudge": "language_model_judge",
    "Halves": "halves",
    "KuhnPoker": "kuhn_poker",
    "MathEnvironment": "math",
    "McpTools": "mcp_tools",
    "PythonRepl": "sandboxed_tools",
    "RewardModelJudge": "reward_model_judge",
    "RuleJudge": "rule_judge",
    "ServedPolicy": "text_generators",
    "Shell": "sandboxed_tools",
    "ShellEnvironment": "shell",
    "SqlEnvironment": "sql",
    "TicTacToe": "tic_tac_toe",
    "ToolEnvironment": "tools",
    "WebSearch": "web_search",
    "WritingEnvironment": "writing",
    "WordEmission": "word_emission",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
