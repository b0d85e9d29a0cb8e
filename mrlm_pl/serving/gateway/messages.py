"""Anthropic's protocol, ``/v1/messages``: requests as OpenAI's chat requests, replies and errors in its own form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrlm_pl.serving.gateway.protocol import Call, ProtocolError, Served, event_text, first_stop, read_call

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_DEFAULTS: Mapping[str, Sequence[Any]] = {
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "thinking": ({"type": "disabled"},),
}


def read_messages(body: Any, ignore: Sequence[str]) -> Call:
    """Return the call that a request's JSON makes; arguments and errors are those of :func:`read_call`."""
    if isinstance(body, Mapping):
        body = {name: value for name, value in body.items() if value not in _DEFAULTS.get(name, ())}
        system, messages, tools = body.pop("system", ""), body.get("messages"), body.get("tools")
        if isinstance(messages, list):
            prompt = [{"role": "system", "content": system}] if system else []
            body["messages"] = [*prompt, *_chat_messages(messages)]
        if isinstance(tools, list):
            body["tools"] = [_chat_tool(tool) for tool in tools]
    return read_call("messages", body, ignore)


def messages_body(call: Call, served: Sequence[Served], id: str) -> dict[str, Any]:
    """Return the reply to a request without a stream; without reasoning, as the protocol's default is."""
    ((_, text, calls, reason),), (reply,) = served, call.replies
    _, stop = first_stop(reply, call.prompt.stop)
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in calls]
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": "stop_sequence" if stop and not calls else _STOP_REASONS[reason],
        "stop_sequence": None if calls else stop,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens},
    }


def messages_events(call: Call, served: Sequence[Served], id: str) -> Iterator[str]:
    """Yield the events of a stream, each block in one piece."""
    body = messages_body(call, served, id)
    ends = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    first_message = body | dict.fromkeys(ends) | {"content": [], "usage": body["usage"] | {"output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": first_message}]
    for index, block in enumerate(body["content"]):
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_start", "index": index, "content_block": block | empty})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": ends, "usage": body["usage"]})
    for event in (*events, {"type": "message_stop"}):
        yield f"event: {event['type']}\n" + event_text(event)


def messages_error(error: ProtocolError) -> dict[str, Any]:
    """Return a refusal as the protocol has it."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.param == "thread":  # the client's tool runner then sends whole conversations
        body["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": body}


def _chat_messages(messages: Sequence[Any]) -> Iterator[Any]:
    """Yield the messages with their blocks as OpenAI's protocol has them; malformed ones are left for its errors."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            yield message
            continue
        results, uses = _blocks(content, "tool_result"), _blocks(content, "tool_use")
        for block in results:
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
        rest = [block for block in content if block not in results and block not in uses]
        if rest or not results:
            calls = [
                {"id": use.get("id"), "function": {"name": use.get("name"), "arguments": json.dumps(use.get("input"))}}
                for use in uses
            ]
            yield {"role": message.get("role"), "content": rest, "tool_calls": calls}


def _blocks(content: Sequence[Any], kind: str) -> list[Mapping[str, Any]]:
    return [block for block in content if isinstance(block, Mapping) and block.get("type") == kind]


def _chat_tool(tool: Any) -> Any:
    """Return a tool with a schema as a function; tools of Anthropic's own servers are left, to be rejected."""
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        return tool
    function = {name: tool.get(name) for name in ("name", "description")}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
