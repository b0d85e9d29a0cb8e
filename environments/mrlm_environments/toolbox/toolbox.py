"""The tools of an environment: by name, as functions or as objects, with one life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FunctionType
from typing import Any, Literal

from mrlm_environments.toolbox.calculator import Calculator
from mrlm_environments.toolbox.files import FileSystem
from mrlm_environments.toolbox.functions import FunctionTool
from mrlm_environments.toolbox.programs import PythonRepl, Shell
from mrlm_environments.toolbox.search import WebSearch
from mrlm_pl.environment.tools import Tool, ToolSet
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError, did_you_mean
from mrlm_pl.settings import check_instance

BUILT_IN = {tool.schema.name: tool for tool in (Calculator, FileSystem, PythonRepl, Shell, WebSearch)}
"""The tools that can be named."""


class Toolbox:
    """Tools that an agent may call; an episode opens and finishes all of them.

    Args:
        items: tools by name (see :data:`BUILT_IN`), functions (see :class:`FunctionTool`), or instances of
            :class:`Tool` or :class:`ToolSet`.

    Raises:
        ConfigurationError: a tool has no name or two have the same one.
    """

    def __init__(self, items: Sequence[ToolSet | Callable[..., Any] | str]) -> None:
        self.items = tuple(_built(item) for item in items)
        _check_names([item.schema.name for item in self.items if isinstance(item, Tool)])

    def named(self) -> dict[str, Tool]:
        """Return all tools by name; a server is asked for its own.

        Raises:
            ConfigurationError: two tools have the same name.
        """
        found = [tool for item in self.items for tool in item.tools()]
        _check_names([tool.schema.name for tool in found])
        return {tool.schema.name: tool for tool in found}

    def open(self, task: Task) -> None:
        """Begin an episode with a fresh state, after the end of one that was left."""
        self.end("finish")
        for item in self.items:
            item.open(task)

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
