"""Replies in channels: those of gpt-oss, in OpenAI's harmony format.

A reply is one or more parts, ``<|start|>HEADER<|channel|>CHANNEL<|message|>TEXT`` up to ``<|end|>``, ``<|call|>`` or
``<|return|>``. The reasoning is in the channel ``analysis``, the answer in ``final``; the header of a call names its
tool, ``to=functions.NAME``, before or after the channel.
"""

from __future__ import annotations

import json
import re

from mrlm_pl.episode import REASONING, Message

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_BORDERS = re.compile(r"<\|(?:start|end|call|return)\|>")
_TOOL = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def without_channels(reply: str) -> str:
    """Return a reply with its reasoning in ``<think>`` and its calls in ``<tool_call>``, as other models write them.

    >>> without_channels("<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>final<|message|>4")
    '<think>\\n2 + 2.\\n</think>\\n\\n4'
    >>> without_channels('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}')
    '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    """
    reasoning, said = list[str](), list[str]()
    for part in _BORDERS.split(reply):
        header, message, text = part.partition(MESSAGE)
        channel, tool = header.partition(CHANNEL)[2].strip(), _TOOL.search(header)
        if tool is not None:
            said.append(f'<tool_call>{{"name": {json.dumps(tool[1])}, "arguments": {text.strip()}}}</tool_call>')
        elif channel.startswith("analysis"):
            reasoning.append(text)
        elif message or header.strip() not in ("", "assistant"):
            said.append(text if message else header)
    thought = [REASONING, *reasoning, "</think>", ""] if reasoning else []
    return "\n".join([*thought, *(said or [""])])


def channel_fields(message: Message) -> dict[str, str]:
    """Return a reply's answer and reasoning for the template; beside calls it takes the reasoning alone.

    >>> channel_fields(Message("assistant", "<think>\\n2 + 2.\\n</think>\\n\\n4"))
    {'content': '4', 'thinking': '2 + 2.'}
    """
    thinking = message.content.rpartition("</think>")[0].strip().removeprefix(REASONING).strip()
    return {"content": "" if message.tool_calls else message.final_text, "thinking": thinking}
