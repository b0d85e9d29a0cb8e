"""Records as messages of the protocol, and back, without loss of any type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mrlm_pl.environment import Observations, Step, ToolSchema
from mrlm_pl.episode import Message, Task, ToolCall
from mrlm_pl.errors import RemoteError
from mrlm_pl.serving.transport import environment_pb2 as pb

T = TypeVar("T")
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
MAX_DEPTH = 29  # messages of a level are three deep, nine are around them, and readers stop at a hundred


def to_value(value: Any) -> pb.Value:
    """Return a JSON-like value, or bytes, with its exact type. Tuples become lists, as in JSON.

    Raises:
        RemoteError: a value of another type, a mapping with keys that are no text, or nesting beyond ``MAX_DEPTH``.

    >>> from_value(to_value({"a": [True, 1, 1.0, None, "x", 2**70]}))
    {'a': [True, 1, 1.0, None, 'x', 1180591620717411303424]}
    """
    message = pb.Value()
    _fill(message, value, 0)
    return message


def _fill(message: pb.Value, value: Any, depth: int) -> None:
    """Write a value into a message; one that were made apart would be copied on every level."""
    if value is None:
        message.null = True
    elif isinstance(value, bool):
        message.boolean = value
    elif isinstance(value, int):
        if _SMALLEST <= value <= _LARGEST:
            message.integer = value
        else:
            message.large_integer = _decimal(value)
    elif isinstance(value, float):
        message.number = value
    elif isinstance(value, str):
        message.text = _encodable(value)
    elif isinstance(value, bytes):
        message.data = value
    elif depth > MAX_DEPTH:
        raise RemoteError(f"a value is nested more than {MAX_DEPTH} deep, too deep for the protocol")
    elif isinstance(value, Mapping):
        message.map.SetInParent()  # it is a map also when it is empty
        _fill_map(message.map, value, depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, (bytearray, memoryview)):
        message.list.SetInParent()
        for item in value:
            _fill(message.list.items.add(), item, depth + 1)
    else:
        raise RemoteError(f"a value of type {type(value).__name__} has no form in the protocol; use JSON-like data")


def _fill_map(message: pb.Map, mapping: Mapping[str, Any], depth: int) -> None:
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise RemoteError(f"the key {key!r} is no text; the protocol's mappings have texts as keys")
        entry = message.entries.add(key=_encodable(key))
        _fill(entry.value, value, depth)


def from_value(value: pb.Value) -> Any:
    """Return the value that :func:`to_value` was given.

    Raises:
        RemoteError: the message says of no kind.
    """
    kind = value.WhichOneof("kind")
    if kind == "null":
        return None
    if kind == "list":
        return [from_value(item) for item in value.list.items]
    if kind == "map":
        return from_map(value.map)
    if kind == "large_integer":
        try:
            return int(value.large_integer)
        except ValueError as error:
            raise RemoteError(f"{value.large_integer[:40]!r} is no integer") from error
    if kind is None:
        raise RemoteError("a value without a kind")
    return getattr(value, kind)


def to_map(mapping: Mapping[str, Any]) -> pb.Map:
    """Return a mapping from texts to values, in its order."""
    message = pb.Map()
    _fill_map(message, mapping, 0)
    return message


def from_map(mapping: pb.Map) -> dict[str, Any]:
    """Return the mapping that :func:`to_map` was given.

    Raises:
        RemoteError: a key comes twice, or a value is malformed.
    """
    return _unique([(entry.key, from_value(entry.value)) for entry in mapping.entries], "the key")


def to_message(message: Message) -> pb.Message:
    """Return a chat message."""
    calls = [
        pb.ToolCall(id=_encodable(call.id), name=_encodable(call.name), arguments=to_map(call.arguments))
        for call in message.tool_calls
    ]
    return pb.Message(
        role=message.role,
        content=_encodable(message.content),
        tool_calls=calls,
        tool_call_id=None if message.tool_call_id is None else _encodable(message.tool_call_id),
        name=None if message.name is None else _encodable(message.name),
    )


def from_message(message: pb.Message) -> Message:
    """Return the chat message that :func:`to_message` was given.

    Raises:
        RemoteError: its role is unknown.
    """
    calls = tuple(ToolCall(call.id, call.name, from_map(call.arguments)) for call in message.tool_calls)
    try:
        return Message(
            message.role,  # type: ignore[arg-type] # Message checks it
            message.content,
            calls,
            message.tool_call_id if message.HasField("tool_call_id") else None,
            message.name if message.HasField("name") else None,
        )
    except ValueError as error:
        raise RemoteError(str(error)) from error


def to_observations(observations: Observations) -> list[pb.AgentMessages]:
    """Observations by agent, in their order."""
    return [
        pb.AgentMessages(agent=agent, messages=[to_message(message) for message in messages])
        for agent, messages in observations.items()
    ]


def from_observations(observations: Sequence[pb.AgentMessages]) -> dict[str, tuple[Message, ...]]:
    """Return the observations that :func:`to_observations` was given."""
    pairs = [(item.agent, tuple(from_message(message) for message in item.messages)) for item in observations]
    return _unique(pairs, "the agent")


def to_actions(actions: Mapping[str, Message]) -> list[pb.AgentAction]:
    """Decisions by agent."""
    return [pb.AgentAction(agent=agent, message=to_message(message)) for agent, message in actions.items()]


def from_actions(actions: Sequence[pb.AgentAction]) -> dict[str, Message]:
    """Return the decisions that :func:`to_actions` was given.

    Raises:
        RemoteError: an agent comes twice, or a message is malformed.
    """
    return _unique([(item.agent, from_message(item.message)) for item in actions], "the agent")


def to_task(task: Task) -> pb.Task:
    """Return a task."""
    return pb.Task(
        environment=task.environment, split=task.split, index=task.index, seed=str(task.seed), data=to_map(task.data)
    )


def from_task(task: pb.Task) -> Task:
    """Return the task that :func:`to_task` was given.

    Raises:
        RemoteError: its seed is no integer.
    """
    try:
        seed = int(task.seed or "0")
    except ValueError as error:
        raise RemoteError(f"the task's seed {task.seed[:40]!r} is no integer") from error
    return Task(task.environment, task.split, task.index, seed, from_map(task.data))


def to_tools(tools: Sequence[ToolSchema]) -> list[pb.ToolSchema]:
    """Schemas of tools."""
    return [
        pb.ToolSchema(name=tool.name, description=tool.description, parameters=to_map(tool.parameters))
        for tool in tools
    ]


def from_tools(tools: Sequence[pb.ToolSchema]) -> tuple[ToolSchema, ...]:
    """Return the schemas that :func:`to_tools` was given."""
    return tuple(ToolSchema(tool.name, tool.description, from_map(tool.parameters)) for tool in tools)


def to_step(session: str, turn: int, step: Step) -> pb.StepReply:
    """Return a step's answer."""
    return pb.StepReply(
        session=session,
        turn=turn,
        observations=to_observations(step.observations),
        rewards=to_map(step.rewards),
        components=[pb.Components(agent=agent, parts=to_map(parts)) for agent, parts in step.components.items()],
        done=step.done,
        stop_reason=step.stop_reason,
        truncated=step.truncated,
        success=step.success,
        metrics=to_map(step.metrics),
    )


def from_step(reply: pb.StepReply) -> Step:
    """Return the step that :func:`to_step` was given."""
    return Step(
        observations=from_observations(reply.observations),
        rewards=from_map(reply.rewards),
        components={item.agent: from_map(item.parts) for item in reply.components},
        done=reply.done,
        stop_reason=reply.stop_reason,
        truncated=reply.truncated,
        success=reply.success if reply.HasField("success") else None,
        metrics=from_map(reply.metrics),
    )


def _unique(pairs: Sequence[tuple[str, T]], what: str) -> dict[str, T]:
    """Return the pairs as a mapping, in their order."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in mapping if names.count(name) > 1)
        raise RemoteError(f"{what} {twice[:100]!r} comes twice")
    return mapping


def _decimal(value: int) -> str:
    try:
        return str(value)
    except ValueError as error:
        raise RemoteError(f"an integer of {value.bit_length()} bits is too large for the protocol") from error


def _encodable(text: str) -> str:
    """Return the text itself; halves of characters, which UTF-8 cannot carry, are replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
