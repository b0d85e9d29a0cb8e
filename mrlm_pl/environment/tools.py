"""Tools that agents call: reading calls out of replies, checking their arguments, and the tools themselves.

A call reaches an environment in ``Message.tool_calls`` where the model's chat template has its own form for calls
(:mod:`mrlm_pl.policy.chat` reads it), else as text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
Nothing here raises on a model's text: a call that cannot be parsed becomes a :class:`MalformedCall` with the reason.
"""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mrlm_pl.environment.contract import ToolSchema
from mrlm_pl.environment.schemas import value_fault
from mrlm_pl.episode import Message, Task, ToolCall
from mrlm_pl.errors import MRLMError
from mrlm_pl.settings import ChecksArguments

MAX_CALLS = 8
"""Calls of one reply that are made; a reply with more has the next one answered as malformed."""

MAX_CALL_CHARACTERS = 100_000

MAX_LEVELS = 100
"""Levels of lists and objects inside one another; records and templates walk through them by recursion."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# A last call may lack its closing tag, which some models sample as the token that ends their turn.
_CALL = re.compile(rf"{_OPEN}(.*?)(?={_OPEN}|{_CLOSE}|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class ToolError(MRLMError):
    """A call that a tool rejects or fails at; the text is for the agent."""


@dataclass(frozen=True)
class MalformedCall:
    """A call that could not be parsed, with its fault."""

    fault: str


def tool_schema(
    name: str,
    description: str,
    required: Mapping[str, Any],
    optional: Mapping[str, Any] | None = None,
    closed: bool = False,
) -> ToolSchema:
    """Return the schema of a tool.

    Args:
        name: name of the tool.
        description: description of the tool, for the agent.
        required: JSON schema of each required argument.
        optional: JSON schema of each optional argument.
        closed: reject calls with other arguments.
    """
    parameters: dict[str, Any] = {"type": "object", "properties": {**required, **(optional or {})}}
    if required:
        parameters["required"] = list(required)
    if closed:
        parameters["additionalProperties"] = False
    return ToolSchema(name, description, parameters)


class ToolSet(ChecksArguments, ABC):
    """Several tools with one life, such as those of a server; copies of an environment have their own."""

    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """Return the tools, always the same ones; may be called before :meth:`open`. The set opens and closes them."""

    def open(self, task: Task) -> None:
        """Begin an episode with a fresh state."""

    def finish(self) -> None:
        """End an episode; unless a subclass keeps something for the next one, this closes the set."""
        self.close()

    def close(self) -> None:
        """Free the resources; may be called twice, and before :meth:`open`."""


class Tool(ToolSet):
    """A tool with a schema, a set of one. An episode opens it, calls it and closes it."""

    schema: ToolSchema

    def tools(self) -> Sequence[Tool]:
        """Return the tool itself."""
        return (self,)

    @abstractmethod
    def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool and return its answer; the arguments have been checked against the schema.

        Raises:
            ToolError: the tool rejects the call or fails; the text is for the agent.
        """


def requested_calls(message: Message) -> tuple[ToolCall | MalformedCall, ...]:
    """Return the calls that an assistant's message asks for, in order, without those in its reasoning.

    >>> requested_calls(Message("assistant", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'))
    (ToolCall(id='call00000', name='add', arguments={'a': 1}),)
    >>> requested_calls(Message("assistant", "<tool_call>{oops</tool_call>"))[0].fault
    'it is not JSON'
    """
    texts = enumerate(_CALL.finditer(message.final_text))
    written = (read_call(text[1].strip(), number) for number, text in texts)
    calls: list[ToolCall | MalformedCall] = list(islice(message.tool_calls or written, MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS] = MalformedCall(f"a reply may ask for {MAX_CALLS} calls at most")
    return tuple(calls)


def written_call(tool: str, /, **arguments: Any) -> str:
    """Return a call as text, in the form that :func:`requested_calls` reads.

    >>> written_call("add", a=1)
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    """
    return f"{_OPEN}{json.dumps({'name': tool, 'arguments': arguments})}{_CLOSE}"


def with_written_calls(message: Message) -> Message:
    """Return a message with its calls in the text too, in the form of :func:`written_call`."""
    calls = (written_call(call.name, **call.arguments) for call in message.tool_calls)
    return replace(message, content="\n".join([*([message.content] if message.content else []), *calls]))


def read_call(text: str, number: int) -> ToolCall | MalformedCall:
    """Return the call written as a JSON object with ``name`` and ``arguments``; ``parameters`` is read as well."""
    if len(text) > MAX_CALL_CHARACTERS:
        return MalformedCall(f"it is longer than {MAX_CALL_CHARACTERS} characters")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return MalformedCall("it is not JSON")
    return call_of(value, number)


def call_of(value: object, number: int) -> ToolCall | MalformedCall:
    """Return the call that a JSON value stands for."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall('it is not an object with a "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a string that holds JSON
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return MalformedCall('its "arguments" are not an object')
    if nested_too_deeply(arguments):
        return MalformedCall(f'its "arguments" are nested more than {MAX_LEVELS} levels deep')
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:  # records hold what JSON has
        return MalformedCall('its "arguments" hold a number that is NaN or infinite')
    identifier = value.get("id")
    return ToolCall(identifier if isinstance(identifier, str) else f"call{number:05d}", value["name"], arguments)


def nested_too_deeply(value: object) -> bool:
    """Return whether a JSON value has more than :data:`MAX_LEVELS` levels.

    >>> nested_too_deeply({"a": [1]}), nested_too_deeply(json.loads("[" * 101 + "]" * 101))
    (False, True)
    """
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        containers = [part for part in level if isinstance(part, (list, dict))]
        level = [item for part in containers for item in (part.values() if isinstance(part, dict) else part)]
    return bool(containers)


def argument_fault(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Return the fault of a call's arguments by the tool's JSON schema, or None.

    >>> add = ToolSchema("add", "", {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]})
    >>> argument_fault(add, {"a": "x"}), argument_fault(add, {}), argument_fault(add, {"a": 1})
    ("a: 'x' is not of type 'number'", "'a' is a required property", None)
    """
    fault = value_fault(schema.parameters, dict(arguments))
    if fault is None or isinstance(fault, str):
        return fault
    path = ".".join(str(key) for key in fault.absolute_path)
    return clip(f"{path}: {fault.message}" if path else fault.message, 300)


def check_call(call: ToolCall | MalformedCall, tools: Sequence[ToolSchema], how: str) -> ToolCall:
    """Return a call that one of the tools can be called with.

    Args:
        call: call that the agent made.
        tools: tools that the agent may call.
        how: the remedy for a call that cannot be read.

    Raises:
        ToolError: the call cannot be read, names no tool, or its arguments do not fit the tool's schema.
    """
    if isinstance(call, MalformedCall):
        raise ToolError(f"malformed call: {call.fault}. {how}")
    schema = next((tool for tool in tools if tool.name == call.name), None)
    if schema is None:
        raise ToolError(f"there is no tool {call.name[:40]!a}; the tools are {', '.join(tool.name for tool in tools)}")
    fault = argument_fault(schema, call.arguments)
    if fault is not None:
        raise ToolError(f"wrong arguments of {call.name}: {fault}")
    return replace(call, arguments=deepcopy(call.arguments))  # a tool may change its own copy


def tool_message(call: ToolCall | MalformedCall, text: str) -> Message:
    """Return the message that answers a call."""
    if isinstance(call, MalformedCall):
        return Message("tool", text)
    return Message("tool", text, tool_call_id=call.id, name=call.name)


def answer_calls(
    calls: Sequence[ToolCall | MalformedCall],
    tools: Sequence[ToolSchema],
    how: str,
    make: Callable[[ToolCall], str],
    fault: str = "Error: ",
    limit: int = sys.maxsize,
) -> Iterator[tuple[Message, bool]]:
    """Make the calls of a reply in order; yield the message that answers each, and whether it was made.

    Args:
        calls: calls that the agent made.
        tools: tools that the agent may call.
        how: the remedy for a call that cannot be read.
        make: returns the observation of a call; the agent reads the text of a :class:`ToolError`.
        fault: prefix of this text.
        limit: maximum number of characters of an answer that the agent sees.

    >>> calls = requested_calls(Message("assistant", written_call("add", a=1) + written_call("subtract")))
    >>> for answer, made in answer_calls(calls, [ToolSchema("add", "")], "", lambda call: f"{call.arguments['a'] + 1}"):
    ...     print(made, answer.content)
    True 2
    False Error: there is no tool 'subtract'; the tools are add
    """
    for call in calls:
        try:
            text, succeeded = make(check_call(call, tools, how)), True
        except ToolError as error:
            text, succeeded = f"{fault}{error}", False
        yield tool_message(call, clip(text, limit)), succeeded


def stated_answer(text: str) -> str | None:
    """Return the content of the last ``<answer>...</answer>`` of a reply, or None.

    >>> stated_answer("<answer>1</answer> or rather <answer> 2 </answer>")
    '2'
    """
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def clip(text: str, limit: int) -> str:
    """Return the text, or its beginning and a note of how much was left out.

    >>> clip("abcdef", 4)
    'abcd\\n[2 more characters]'
    """
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters]"


def tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return instructions for models whose chat template does not list tools.

    Args:
        tools: schemas as :meth:`ToolSchema.to_chat` gives them.
    """
    lines = "\n".join(json.dumps(tool["function"]) for tool in tools)
    return (
        f"You may call these tools, each described by a JSON schema:\n{lines}\n"
        f'To call one, write {_OPEN}{{"name": NAME, "arguments": OBJECT}}{_CLOSE}.'
    )
