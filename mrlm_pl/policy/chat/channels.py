"""Replies in channels: those of gpt-oss, in OpenAI's harmony format.

A reply is one or more parts, ``<|start|>HEADER<|channel|>CHANNEL<|message|>TEXT`` up to ``<|end|>``, ``<|call|>`` or
``<|return|>``. The reasoning is in the channel ``analysis``, the answer in ``final``; the header of a call names its
tool, ``to=functions.NAME``, before or after the channel.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mrlm_pl.episode import REASONING, Message, reasoning_text, with_reasoning

CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
_BORDERS = re.compile(r"<\|(?:start|end|call|return)\|>")
_TOOL = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def without_channels(reply: str) -> str:
    """Return a reply with its reasoning in ``<think>`` and its calls in ``<tool_call>``, as other models write them.

    >>> without_channels("<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>final<|message|>4")
    '<think>\\n2 + 2.\\n</think>\\n\\n4'
    >>> without_channels('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}')
    '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    """
    plain, *parts = _BORDERS.split(reply)
    if CHANNEL in plain or MESSAGE in plain:  # the header begins in the prompt
        plain, parts = "", [plain, *parts]
    reasoning, said = list[str](), [plain] * bool(plain)
    for part in parts:
        author = part.partition(CHANNEL)[0].partition(MESSAGE)[0].strip()
        if author and not author.startswith(("assistant", "to=")):
            continue  # the model has written another's message
        called = None
        for piece in part.split(CHANNEL):
            header, message, text = piece.partition(MESSAGE)
            called = _TOOL.search(header) or called  # the tool comes before or after the channel
            if message and called:
                name, called = json.dumps(called[1]), None
                said.append(f'<tool_call>{{"name": {name}, "arguments": {text.strip()}}}</tool_call>')
            elif message:
                (reasoning if "analysis" in header.split() else said).append(text)
    return with_reasoning("\n".join(reasoning), "\n".join(said))


def channel_fields(message: Message) -> dict[str, Any]:
    """Return a reply for the template: answer, reasoning, and a call, beside which it takes the reasoning alone.

    >>> channel_fields(Message("assistant", "<think>\\n2 + 2.\\n</think>\\n\\n4"))
    {'content': '4', 'thinking': '2 + 2.'}
    """
    content = message.content
    fields = {"thinking": reasoning_text(content)} if content.startswith(REASONING) else {}
    if len(message.tool_calls) != 1:  # the template writes one call; several stay in the text
        return {"content": message.final_text} | fields
    return {"content": "", "tool_calls": message.to_chat()["tool_calls"]} | fields
