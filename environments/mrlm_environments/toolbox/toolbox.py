"""The tools of an environment, and the calls that an episode makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FunctionType
from typing import Any, Literal

from mrlm_environments.toolbox.calculator import Calculator
from mrlm_environments.toolbox.files import FileSystem
from mrlm_environments.toolbox.functions import FunctionTool
from mrlm_environments.toolbox.programs import PythonRepl, Shell
from mrlm_environments.toolbox.search import WebSearch
from mrlm_pl.environment import ToolSchema
from mrlm_pl.environment.tools import Tool, ToolCall, ToolSet, answer_calls, requested_calls
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, did_you_mean
from mrlm_pl.settings import check_instance

BUILT_IN = {tool.schema.name: tool for tool in (Calculator, FileSystem, PythonRepl, Shell, WebSearch)}
"""The tools that can be named."""

_CALL_FORM = 'Write {"name": NAME, "arguments": OBJECT}.'


class Toolbox:
    """Tools that agents may call; an episode opens and finishes all of them.

    Args:
        items: tools by name (see :data:`BUILT_IN`), functions (see :class:`FunctionTool`), or instances of
            :class:`Tool` or :class:`ToolSet`.
        limit: characters of an answer that the agent sees.

    Attributes:
        available: tools of the episode by name; none before :meth:`open`.
        counts: ``tool_calls`` and ``tool_errors`` of the episode.
        used: names of the tools that the episode has called successfully.

    Raises:
        ConfigurationError: a tool has no name or two have the same one.
    """

    def __init__(self, items: Sequence[ToolSet | Callable[..., Any] | str], limit: int = sys.maxsize) -> None:
        self.items, self.limit = tuple(_built(item) for item in items), limit
        self.available: dict[str, Tool] = {}
        _check_names([item.schema.name for item in self.items if isinstance(item, Tool)])

    def named(self) -> dict[str, Tool]:
        """Return all tools by name; a server is asked for its own.

        Raises:
            ConfigurationError: two tools have the same name.
        """
        found = [tool for item in self.items for tool in item.tools()]
        _check_names([tool.schema.name for tool in found])
        return {tool.schema.name: tool for tool in found}

    def schemas(self) -> list[ToolSchema]:
        """Return the schemas of all tools; see :meth:`named`."""
        return [tool.schema for tool in self.named().values()]

    def open(self, task: Task) -> None:
        """Begin an episode with a fresh state, after the end of one that was left."""
        self.end("finish")
        for item in self.items:
            item.open(task)
        self.available, self.used = self.named(), set[str]()
        self.counts = {"tool_calls": 0.0, "tool_errors": 0.0}

    def answer(self, message: Message) -> list[Message]:
        """Make the calls of a reply in order; return the message that answers each: a result, or an error."""
        schemas = [tool.schema for tool in self.available.values()]
        answers = []
        for answer, made in answer_calls(
            requested_calls(message), schemas, _CALL_FORM, self._call, "error: ", self.limit
        ):
            answers.append(answer)
            self.counts["tool_calls"] += 1
            self.counts["tool_errors"] += not made
        return answers

    def _call(self, call: ToolCall) -> str:
        text = self.available[call.name].call(call.arguments)
        self.used.add(call.name)
        return text

    def end(self, how: Literal["finish", "close"]) -> None:
        """Finish or close all tools, even if one cannot be."""
        with ExitStack() as stack:
            for item in self.items:
                stack.callback(getattr(item, how))


def _built(item: ToolSet | Callable[..., Any] | str) -> ToolSet:
    if isinstance(item, ToolSet):
        return item
    if not isinstance(item, str):
        check_instance(FunctionType, item, "tools", "a tool or function")  # nothing resets a method's object
        return FunctionTool(item)
    if item not in BUILT_IN:
        known = f"known are: {', '.join(BUILT_IN)}; a function is given itself, or ./FILE.py:NAME in a configuration"
        hint = did_you_mean(item, BUILT_IN, known)
        raise ConfigurationError(f"tools: there is no tool {item!r}; {hint}")
    return BUILT_IN[item]()


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"tools: two are named {name!r}; leave one out or change its schema's name")
