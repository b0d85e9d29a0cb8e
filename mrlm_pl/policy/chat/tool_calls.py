"""The form of a chat template's tool calls, detected by rendering one, and its parser.

:func:`find_call_form` renders a call of known name, keys and values (``PROBE_CALL``) with the template, and looks for
them in the text: as JSON (:class:`JSONForm`), or each between texts of its own (:class:`TaggedForm`). The form is used
only if it reads that call back.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mrlm_pl.environment.schemas import value_fault
from mrlm_pl.environment.tools import MAX_CALL_CHARACTERS, call_of, tool_schema
from mrlm_pl.episode import Message, ToolCall, final_text
from mrlm_pl.grouping import common_prefix

_NAME = "probe_tool"
_ARGUMENTS = {"first_key": "first value", "second_key": 271}
PROBE_CALL = ToolCall("call00000", _NAME, _ARGUMENTS)
PROBE_TOOL = tool_schema(
    _NAME, "A tool.", {"first_key": {"type": "string"}}, {"second_key": {"type": "integer"}}
).to_chat()
QUESTION = Message("user", "x")
SENTINEL = "\u241f0\u241f"
_DECODER = json.JSONDecoder()

Tools = Sequence[Mapping[str, Any]]
"""Schemas as ``ToolSchema.to_chat`` gives them."""


class CallForm(ABC):
    """A form of calls."""

    opening: str

    def read(self, text: str, tools: Tools) -> tuple[ToolCall, ...]:
        """Return the calls after a reply's reasoning; none if one is malformed, which an environment sees in the text.

        Args:
            text: reply with its special tokens.
            tools: schemas with the types of values.
        """
        text = final_text(text)
        if len(text) > MAX_CALL_CHARACTERS:
            return ()
        try:
            calls = [call_of(value, number) for number, value in enumerate(self.values(text, tools))]
        except (ValueError, RecursionError):
            return ()
        read = tuple(call for call in calls if isinstance(call, ToolCall))
        return read if len(read) == len(calls) else ()

    @abstractmethod
    def values(self, text: str, tools: Tools) -> Iterator[object]:
        """Return the calls as objects with ``name`` and ``arguments``.

        Raises:
            ValueError: a call is malformed.
        """


@dataclass(frozen=True)
class JSONForm(CallForm):
    """Calls with their arguments as JSON: those of Qwen 2.5 and 3, Hermes, Llama 3, Mistral, gpt-oss and others.

    Args:
        opening: text before the JSON with name and arguments (``<tool_call>``), empty if the JSON is all of the reply;
            or before the name, if that is outside the JSON.
        between: text between name and arguments; None if both are in one JSON object.

    >>> JSONForm("<tool_call>").read('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [])
    (ToolCall(id='call00000', name='add', arguments={'a': 1}),)
    >>> JSONForm("").read('{"name": "add", "parameters": {}}', [])[0].name
    'add'
    >>> JSONForm("[CALL]", "[ARGS]").read('[CALL]add[ARGS]{"a": 1}', [])[0].arguments
    {'a': 1}
    """

    opening: str
    between: str | None = None

    def values(self, text: str, tools: Tools) -> Iterator[object]:
        """See :meth:`CallForm.values`."""
        if not self.opening:
            value, stop = _DECODER.raw_decode(text.strip())
            if stop == len(text.strip()):
                yield from value if isinstance(value, list) else [value]
            return
        position = text.find(self.opening)
        while position >= 0:
            start = position + len(self.opening)
            name = None
            if self.between is not None:
                name, separator, _ = text[start:].partition(self.between)
                if not separator:
                    raise ValueError("no arguments")
                start += len(name) + len(separator)
            start += len(text[start:]) - len(text[start:].lstrip())
            value, stop = _DECODER.raw_decode(text, start)
            if name is not None:
                value = {"name": name.strip(), "arguments": value}
            yield from value if isinstance(value, list) else [value]
            position = text.find(self.opening, stop)


@dataclass(frozen=True)
class TaggedForm(CallForm):
    """Calls with a tag for each argument: those of Qwen 3.5 and later, Qwen Coder, GLM, Nemotron and others.

    Args:
        opening: text before the name.
        after_name: text after the name.
        before_key: text before the name of an argument.
        after_key: text between the name of an argument and its value.
        after_value: text after the value.

    >>> form = TaggedForm("<function=", ">", "<parameter=", ">", "</parameter>")
    >>> form.read("<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>", [])[0].arguments
    {'a': '1'}
    """

    opening: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str

    def values(self, text: str, tools: Tools) -> Iterator[object]:
        """See :meth:`CallForm.values`."""
        for call in text.split(self.opening)[1:]:
            name, separator, remainder = call.partition(self.after_name)
            if not separator:
                raise ValueError("the name does not end")
            name, arguments = name.strip(), {}
            while remainder.lstrip().startswith(self.before_key):
                remainder = remainder.lstrip()[len(self.before_key) :]
                key, key_end, remainder = remainder.partition(self.after_key)
                value, value_end, remainder = remainder.partition(self.after_value)
                if not key_end or not value_end:
                    raise ValueError("an argument does not end")
                arguments[key.strip()] = _typed_value(value.strip("\n"), name, key.strip(), tools)
            yield {"name": name, "arguments": arguments}


def find_call_form(render: Callable[[list[Message], bool], str]) -> CallForm | None:
    """Return the form of a template's calls, or None if it has none that can be read back.

    Args:
        render: function that returns the text of messages, with or without the generation prompt; may raise any error.
    """
    try:
        *_, written = written_reply(render, Message("assistant", "", (PROBE_CALL,)))
    except Exception:  # templates raise errors of their own classes
        return None
    form = _json_form(written) or _tagged_form(written)
    return form if form is not None and form.read(written, [PROBE_TOOL]) == (PROBE_CALL,) else None


def written_reply(render: Callable[[list[Message], bool], str], reply: Message) -> tuple[str, str, str]:
    """Return a template's text of a question, of the assistant's header, and of a reply up to the end of its turn.

    Args:
        render: function that renders messages; see :func:`find_call_form`.
        reply: message of the assistant.
    """
    question, prompted, answered = render([QUESTION], False), render([QUESTION], True), render([QUESTION, reply], False)
    _, _, closing = render([QUESTION, Message("assistant", "probe")], False).rpartition("probe")
    prompt, turn = prompted[len(question) :], answered[len(question) :]
    header = prompt[: common_prefix(prompt, turn)]
    if header != prompt:  # a call continues differently; both may begin with the same letters
        header = header[: max(header.rfind("\n"), header.rfind(">")) + 1]
    return question, header, turn[len(header) :].removesuffix(closing)


def _json_form(written: str) -> CallForm | None:
    name, key = written.find(_NAME), written.find("first_key")
    if name < 0 or key < 0:
        return None
    for brace in (index for index, letter in enumerate(written[:name]) if letter == "{"):
        value = _decode_json(written, brace)
        if isinstance(value, dict) and value.get("name") == _NAME and _ARGUMENTS in value.values():
            return JSONForm(_last_word(written[:brace].rstrip().removesuffix("[")))
    brace = written.rfind("{", 0, key)
    if brace > name and _decode_json(written, brace) == _ARGUMENTS:
        return JSONForm(_last_word(written[:name]), written[name + len(_NAME) : brace].strip())
    return None


def _tagged_form(written: str) -> CallForm | None:
    """Return the form, by the texts between name, keys and values."""
    texts, remainder = [], written
    for mark in (_NAME, "first_key", "first value", "second_key", "271"):
        text, separator, remainder = remainder.partition(mark)
        if not separator:
            return None
        texts.append(text)
    opening, name_to_key, after_key, value_to_key, after_second_key = texts
    shared = common_prefix(name_to_key[::-1], value_to_key[::-1])
    before_key = name_to_key[len(name_to_key) - shared :].rpartition("\n")[2]
    after_name, after_value = (text.removesuffix(before_key).strip() for text in (name_to_key, value_to_key))
    after_name = after_name or "\n" * name_to_key.startswith("\n")  # GLM ends a name with the line
    form = TaggedForm(_last_word(opening), after_name, before_key, after_key.strip(), after_value)
    marks = (form.opening, after_name, before_key, form.after_key, after_value)
    return form if after_second_key == after_key and all(marks) and not any(_NAME in mark for mark in marks) else None


def _typed_value(text: str, tool: str, argument: str, tools: Tools) -> Any:
    """Return the value of an argument's text: read as JSON, unless the tool's schema expects a text."""
    schemas = (entry["function"].get("parameters") or {} for entry in tools if entry["function"]["name"] == tool)
    parameters = next(iter(schemas), {})
    schema = (parameters.get("properties") or {}).get(argument)
    if schema is None:  # parquet fills it in
        return text
    optional = {key: parameters[key] for key in ("properties", "$defs", "definitions") if key in parameters}
    with suppress(ValueError, RecursionError):  # the check against the schema reports it
        value = json.loads(text)
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        takes_text = is_text or value_fault(optional, {argument: text}) is None
        if not isinstance(value, str) and not (takes_text and value_fault(optional, {argument: value})):
            return value
    return text


def _last_word(text: str) -> str:
    return (text.split() or [""])[-1]


def _decode_json(text: str, start: int) -> object:
    try:
        return _DECODER.raw_decode(text, start)[0]
    except ValueError:
        return None
