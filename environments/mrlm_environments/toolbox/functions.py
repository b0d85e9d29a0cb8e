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
        ConfigurationError: it is no function or async, or lacks an annotation or a description of an argument.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # Imported here: it brings torch.
        from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

        check_instance((FunctionType, MethodType), function, "tools", "tool or function")
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(f"tools: the function {function.__name__} is async; give a plain one")
        try:
            schema = get_json_schema(function)["function"]
        except (DocstringParsingException, TypeHintParsingException) as error:
            remedy = "annotate its arguments, and describe each in a docstring in Google's style"
            raise ConfigurationError(f"tools: {error}; {remedy}") from error
        parameters = {**schema["parameters"], "additionalProperties": False}
        self.function = function
        self.schema = ToolSchema(schema["name"], schema["description"], parameters)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the function's result as text, its exceptions as a :class:`ToolError`; see :meth:`Tool.call`."""
        try:
            return str(self.function(**arguments))
        except Exception as error:  # of the user's
            raise ToolError(f"{type(error).__name__}: {error}") from error
