"""OpenAI's protocol: requests as calls, replies as JSON or server-sent events, and errors in its form.

Covers ``/v1/chat/completions`` and ``/v1/responses``; :mod:`~mrlm_pl.serving.gateway.messages` has ``/v1/messages``.
Every parameter is served, has no effect on the reply, has the protocol's default value, or is rejected by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mrlm_pl.environment.contract import ToolSchema
from mrlm_pl.environment.prompts import Prompt, Reply
from mrlm_pl.environment.tools import requested_calls
from mrlm_pl.episode import REASONING, ROLES, Message, ToolCall, final_text, reasoning_text, with_reasoning

MOST_REPLIES = MOST_STOPS = 16
"""Largest ``n`` of a call, and most of its stop texts."""

_NO_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "stream_options",
}
_DEFAULTS: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "background": False,
    "reasoning": {},
    "modalities": ["text"],
}
_KEPT_ELSEWHERE = {"previous_response_id", "conversation", "prompt", "thread"}
"""Parameters that name messages which the server keeps: without an effect they would lose them."""

_SERVED: Mapping[str, set[str]] = {
    "chat": {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "n", "stream", "logprobs"},
    "responses": {"model", "input", "instructions", "tools", "max_output_tokens", "stream"},
    "messages": {"model", "messages", "tools", "max_tokens", "stop_sequences", "stream"},
}
_ROLES = {"developer": "system"}
_TEXT = ("text", "input_text", "output_text", "refusal", "reasoning_text")
Served = tuple[str, str, tuple[ToolCall, ...], str]
"""The reasoning, the text, the tool calls and the finish reason with which a reply is served."""


class ProtocolError(Exception):
    """A rejected call, answered in the protocol's form.

    Args:
        status: HTTP status.
        code: short word for programs.
        message: the fault and the remedy.
        param: name of the parameter at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """Return the error as the protocol has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass
class Call:
    """A request for one reply or several.

    Args:
        model: model's name in the request.
        prompt: conversation to continue.
        count: number of replies.
        stream: whether to answer with events.
        usage: whether a stream ends with the number of tokens.
    """

    model: str
    prompt: Prompt
    count: int = 1
    stream: bool = False
    usage: bool = False
    replies: list[Reply] = field(default_factory=list)


def read_call(form: Literal["chat", "responses", "messages"], body: Any, ignore: Sequence[str]) -> Call:
    """Return the call that a request's JSON makes.

    Args:
        form: form of the request.
        body: JSON of the request.
        ignore: parameters that are accepted without an effect.

    Raises:
        ProtocolError: the request is malformed, or has a parameter that cannot be served.
    """
    if not isinstance(body, Mapping):
        raise ProtocolError(400, "invalid_request", f"the body is a {type(body).__name__}; send a JSON object")
    for name, value in body.items():
        if name in _KEPT_ELSEWHERE and value is not None:
            text = f"the parameter {name!r} cannot be served: no conversation or prompt is kept here; send all messages"
            raise ProtocolError(400, "unsupported_parameter", text, name)
        free = name in _SERVED[form] or name in _NO_EFFECT or name in ignore or value is None
        free = free or (name == "include" and "logprobs" not in str(value))
        if not free and (name not in _DEFAULTS or value != _DEFAULTS[name]):
            reason = "the run's own sampling decides, since it is what training assumes"
            if "logprobs" in f"{name} {value}":
                reason = "only sampled tokens have log-probabilities, for `logprobs: true` at /v1/chat/completions"
            fault = f"the parameter {name!r} ({json.dumps(value)[:60]}) cannot be served: {reason}"
            remedy = "leave it out, or list it in the environment's `ignore`"
            raise ProtocolError(400, "unsupported_parameter", f"{fault}; {remedy}", name)
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    limit = min((_whole(name, body[name]) for name in limits if body.get(name) is not None), default=None)
    ends = "stop_sequences" if form == "messages" else "stop"
    stop = body.get(ends)
    stops = ([stop] if stop else []) if isinstance(stop, str | None) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(x, str) and x for x in stops):
        raise _fault(ends, f"is {stop!r:.60}; give a text or a list of at most {MOST_STOPS} texts")
    messages = _response_messages(body) if form == "responses" else _chat_messages(body.get("messages"))
    count = 1 if body.get("n") is None else _whole("n", body["n"])
    if count > MOST_REPLIES:
        raise _fault("n", f"is {count}; it must be at most {MOST_REPLIES}")
    stream, options = body.get("stream"), body.get("stream_options") or {}
    logprobs = body.get("logprobs") if form == "chat" else None
    for name, value in (("stream", stream), ("logprobs", logprobs)):
        if not isinstance(value, bool | None):
            raise _fault(name, f"is {value!r:.60}; give true or false")
    return Call(
        str(body.get("model", "")),
        Prompt(messages, _tools(body.get("tools")), limit, tuple(stops), bool(logprobs)),
        count,
        bool(stream),
        isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


def first_stop(reply: Reply, stops: Sequence[str]) -> tuple[int | None, str | None]:
    """Return the place of the first stop text in a reply, and the text; None without one.

    It is that after the reasoning, unless the reasoning is all: its tags may be those of the chat template.
    """
    start = len(reply.content) - len(reply.final_text or reply.content.removeprefix(REASONING).lstrip())
    found = [(place, stop) for stop in stops if (place := reply.content.find(stop, start)) >= 0]
    return min(found, default=(None, None))


def served_form(reply: Reply, prompt: Prompt, number: int) -> Served:
    """Return the reasoning, the text, the tool calls and the finish reason with which a reply is served.

    Args:
        reply: reply as it was sampled.
        prompt: prompt of the reply: its stop texts are removed, and without tools there are no calls.
        number: index of the reply in its episode, which makes the ids of calls unique.
    """
    content = reply.content[: first_stop(reply, prompt.stop)[0]]
    reasoning, text = reasoning_text(content), final_text(content)
    requested = requested_calls(reply.message) if prompt.tools else ()
    calls = tuple(
        ToolCall(f"call_{number}_{index}", call.name, call.arguments)
        for index, call in enumerate(requested)
        if isinstance(call, ToolCall)
    )
    if not calls or len(calls) < len(requested):  # a malformed call is left in the text
        return reasoning, text, (), reply.finish_reason
    before = text.partition("<tool_call>")[0].strip() if "<tool_call>" in text else ""
    return reasoning, before, calls, "tool_calls"


def chat_body(call: Call, served: Sequence[Served], id: str) -> dict[str, Any]:
    """Return the reply to a request without a stream."""
    choices = [
        {
            "index": index,
            "message": _chat_message(reply),
            "finish_reason": reply[-1],
            "logprobs": _logprobs(call, index),
        }
        for index, reply in enumerate(served)
    ]
    return _envelope(call, id, "chat.completion") | {"choices": choices, "usage": _usage(call)}


def chat_events(call: Call, served: Sequence[Served], id: str) -> Iterator[str]:
    """Yield the events of a stream: of each reply the reasoning, the text and each call, in this order.

    Each is whole, but alone: some clients read only one part, or only one call, of an event.
    """
    head = _envelope(call, id, "chat.completion.chunk")
    for index, reply in enumerate(served):
        begin = _chat_message(reply)
        text, calls = {"content": begin.pop("content")}, begin.pop("tool_calls", ())
        deltas = [begin, text, *({"tool_calls": [item | {"index": number}]} for number, item in enumerate(calls)), {}]
        for delta in deltas:
            logprobs = _logprobs(call, index) if delta is text else None
            choice = {"index": index, "delta": delta, "finish_reason": None if delta else reply[-1]}
            choice["logprobs"] = logprobs
            yield event_text(head | {"choices": [choice]})
    if call.usage:
        yield event_text(head | {"choices": [], "usage": _usage(call)})
    yield "data: [DONE]\n\n"


def responses_body(call: Call, served: Sequence[Served], id: str) -> dict[str, Any]:
    """Return the reply to a request of ``/v1/responses``."""
    ((reasoning, text, calls, reason),) = served
    output: list[dict[str, Any]] = []
    if reasoning:
        thought = [{"type": "reasoning_text", "text": reasoning}]
        output.append({"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": thought, "status": "completed"})
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        output.append(message)
    for tool_call in calls:
        ids = {"id": f"fc_{tool_call.id}", "call_id": tool_call.id}
        output.append({**ids, "type": "function_call", **_function(tool_call), "status": "completed"})
    usage = _usage(call)
    complete = reason != "length"
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if complete else "incomplete",
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "error": None,
        "model": call.model,
        "output": output,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        },
    }


def responses_events(call: Call, served: Sequence[Served], id: str) -> Iterator[str]:
    """Yield the events of a stream of ``/v1/responses``, each item in one piece."""
    body = responses_body(call, served, id)
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": body | {"status": "in_progress", "output": [], "usage": None}}
    ]
    for index, item in enumerate(body["output"]):
        position = {"output_index": index, "item_id": item["id"]}
        empty_item: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item | empty_item})
        if item["type"] != "function_call":
            (part,) = item["content"]
            position |= {"content_index": 0} | ({"logprobs": []} if "logprobs" in part else {})
            kind, empty = f"response.{part['type']}", part | {"text": ""}
            events.append({"type": "response.content_part.added", "part": empty, **position})
            events.append({"type": f"{kind}.delta", "delta": part["text"], **position})
            events.append({"type": f"{kind}.done", "text": part["text"], **position})
            events.append({"type": "response.content_part.done", "part": part, **position})
        else:
            arguments = item["arguments"]
            events.append({"type": "response.function_call_arguments.delta", "delta": arguments, **position})
            done = {"arguments": arguments, "name": item["name"]}
            events.append({"type": "response.function_call_arguments.done", **done, **position})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{body['status']}", "response": body})
    for number, event in enumerate(events):
        yield f"event: {event['type']}\n" + event_text(event | {"sequence_number": number})


def event_text(data: Mapping[str, Any]) -> str:
    """Return the data of a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def _chat_message(served: Served) -> dict[str, Any]:
    reasoning, text, calls, _ = served
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [{"id": c.id, "type": "function", "function": _function(c)} for c in calls]
    return message


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": json.dumps(call.arguments)}


def _envelope(call: Call, id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": call.model}


def _usage(call: Call) -> dict[str, Any]:
    prompt, tokens = call.replies[0].prompt_tokens, sum(reply.tokens for reply in call.replies)
    details = {"reasoning_tokens": sum(reply.reasoning_tokens for reply in call.replies)}
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return counts | {"completion_tokens_details": details}


def _logprobs(call: Call, index: int) -> dict[str, Any] | None:
    """Return the log-probabilities of all sampled tokens, also those of reasoning, calls and the end."""
    if not call.prompt.logprobs:
        return None
    return {
        "content": [
            {
                "token": text,
                "logprob": logprob,
                "bytes": None if "\ufffd" in text else [*text.encode()],  # part of a character
                "top_logprobs": [],
            }
            for text, logprob in call.replies[index].sampled
        ],
        "refusal": None,
    }


def _chat_messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise _fault("messages", "must be a list with at least one message")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(messages))


def _message(item: Any, path: str) -> Message:
    if not isinstance(item, Mapping):
        raise _fault(path, f"is {item!r:.60}; give an object with role and content")
    role = _ROLES.get(str(item.get("role")), item.get("role"))
    if role not in ROLES:
        raise _fault(f"{path}.role", f"is {role!r}; it must be one of {', '.join(ROLES)}, developer")
    tool_calls = item.get("tool_calls") or []
    if not isinstance(tool_calls, list) or not all(isinstance(call, Mapping) for call in tool_calls):
        raise _fault(f"{path}.tool_calls", f"is {tool_calls!r:.60}; give a list of objects")
    thought = item.get("reasoning_content") or item.get("reasoning")
    reasoning = _text(thought, f"{path}.reasoning") if role == "assistant" else ""
    if item.get("content") is None and not (tool_calls or item.get("refusal") or reasoning):
        raise _fault(f"{path}.content", "is missing; give a text, or the tool calls of a reply")
    calls = tuple(_tool_call(call.get("id"), call.get("function"), f"{path}.tool_calls") for call in tool_calls)
    answered = item.get("tool_call_id")
    if not isinstance(answered, str | None):  # records hold texts
        raise _fault(path, f"answers the call {answered!r:.60}; the id of a call is a text")
    return Message(role, with_reasoning(reasoning, _text(item.get("content"), path)), calls, answered)


def _response_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    value = body.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise _fault("input", "must be a text or a list with at least one item")
    messages = [Message("system", str(body["instructions"]))] if body.get("instructions") else []
    reasoning = ""
    for number, item in enumerate(items):
        path = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":  # of the reply whose text or call is next
            reasoning = "\n".join(filter(None, (reasoning, _text(item.get("content"), path))))
            continue
        if reasoning and kind != "function_call" and not (kind == "message" and item.get("role") == "assistant"):
            messages.append(Message("assistant", with_reasoning(reasoning, "")))
            reasoning = ""
        if kind == "function_call":
            call = _tool_call(item.get("call_id"), item, path)
            begun = messages and messages[-1].role == "assistant" and not reasoning  # the parts of one reply
            reply = messages.pop() if begun else Message("assistant", with_reasoning(reasoning, ""))
            messages.append(replace(reply, tool_calls=(*reply.tool_calls, call)))
        elif kind == "function_call_output":
            answer = {"role": "tool", "content": item.get("output") or "", "tool_call_id": item.get("call_id")}
            messages.append(_message(answer, path))
        elif kind == "message":
            messages.append(_message(item | {"reasoning": reasoning}, path))
        else:
            raise _fault(f"{path}.type", f"is {kind!r}; send messages, reasoning, function calls and their outputs")
        reasoning = ""
    if reasoning:
        messages.append(Message("assistant", with_reasoning(reasoning, "")))
    return tuple(messages)


def _tool_call(id: Any, function: Any, path: str) -> ToolCall:
    try:
        arguments = json.loads(function["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise TypeError("they are not an object")
        json.dumps(arguments, allow_nan=False)  # as records demand
        return ToolCall(str(id), str(function["name"]), arguments)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        text = f"holds a call without a name or with arguments that are not a JSON object: {error}"
        raise _fault(path, text) from None


def _text(content: Any, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT:
            raise _fault(f"{path}.content", f"holds {part!r:.60}; only text can be served")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _tools(tools: Any) -> tuple[ToolSchema, ...]:
    if not isinstance(tools, list | None):
        raise _fault("tools", f"is {tools!r:.80}; give a list")
    schemas = []
    for index, tool in enumerate(tools or ()):
        kind, function = (tool.get("type"), tool.get("function", tool)) if isinstance(tool, Mapping) else ("", {})
        if not isinstance(function, Mapping) or kind != "function" or not function.get("name"):
            raise _fault(f"tools[{index}]", f"is {tool!r:.80}; only functions with a name can be served")
        if not isinstance(function["name"], str):
            raise _fault(f"tools[{index}].name", f"is {function['name']!r:.60}; give a text")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties"), Mapping | None):
            raise _fault(f"tools[{index}].parameters", f"is {parameters!r:.60}; give a JSON schema")
        schemas.append(ToolSchema(function["name"], str(function.get("description") or ""), parameters))
    return tuple(schemas)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _fault(name, f"is {value!r:.60}; it must be a whole number of 1 or above")
    return value


def _fault(param: str, text: str) -> ProtocolError:
    return ProtocolError(400, "invalid_request", f"{param} {text}", param)
