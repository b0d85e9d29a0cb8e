"""Functions as tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from mrlm_pl.environment import ToolSchema
from mrlm_pl.environment.tools import Tool, ToolError
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import check_instance


class FunctionTool(Tool):
    """A function as a tool. Its name, annotations and docstring, in Google's style, are the schema.

    Args:
        function: function of the arguments of a call, also a method of an object; its result is written as text.

    Raises:
        ConfigurationError: it is not a function, async or a generator, has an argument without a name, or lacks an
            annotation or a description of an argument.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from transformers.utils import get_json_schema  # imported here: it brings torch

        check_instance((FunctionType, MethodType), function, "tools", "a tool or function")
        name = f"tools: the function {function.__name__}"
        for waits_or_yields in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if waits_or_yields(function):
                raise ConfigurationError(f"{name} is async or yields; give a plain one, which returns its result")
        for argument in inspect.signature(function).parameters.values():
            if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
                kind = argument.kind.description
                raise ConfigurationError(
                    f"{name} has a {kind} argument, {argument.name!r}; calls name each argument, so replace it"
                )
        try:
            schema = get_json_schema(function)["function"]
        except Exception as error:  # it evaluates the user's annotations
            remedy = "annotate its arguments, and describe each under `Args:` of its docstring in a line `NAME: TEXT`"
            raise ConfigurationError(f"{name}: {error}; {remedy}") from error
        parameters = {**schema["parameters"], "additionalProperties": False}
        self.function = function
        self.schema = ToolSchema(schema["name"], schema["description"], parameters)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the function's result as text, its exceptions as a :class:`ToolError`; see :meth:`Tool.call`."""
        try:
            return str(self.function(**arguments))
        except (Exception, SystemExit) as error:  # of the user's, also ``sys.exit``
            raise ToolError(f"{type(error).__name__}: {error}") from error
