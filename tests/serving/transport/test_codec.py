from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlm_pl.environment import Step, ToolSchema
from mrlm_pl.episode import Message, Task, ToolCall
from mrlm_pl.errors import RemoteError
from mrlm_pl.serving.transport import codec
from mrlm_pl.serving.transport import environment_pb2 as pb

FEW = settings(max_examples=15, deadline=None)  # the machine may be busy
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # surrogates are no characters of UTF-8
NUMBERS = st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-(2**80), 2**80) | NUMBERS | TEXTS | st.binary()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=15
)
MAPS = st.dictionaries(TEXTS, VALUES, max_size=4)
CALLS = st.builds(ToolCall, TEXTS, TEXTS, MAPS)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXTS,
    st.lists(CALLS, max_size=2).map(tuple),
    st.none() | TEXTS,
    st.none() | TEXTS,
)
AGENTS = st.dictionaries(TEXTS, st.lists(MESSAGES, max_size=3).map(tuple), max_size=3)
AMOUNTS = st.dictionaries(TEXTS, NUMBERS | st.integers() | st.booleans(), max_size=3)
STEPS = st.builds(
    Step,
    AGENTS,
    AMOUNTS,
    st.dictionaries(TEXTS, AMOUNTS, max_size=3),
    st.booleans(),
    TEXTS,
    st.booleans(),
    st.none() | st.booleans(),
    AMOUNTS,
)


def exact(value: Any) -> str:
    """A text that tells values, types and orders apart; ``True == 1 == 1.0`` to Python."""
    return repr(value)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@FEW
@given(VALUES)
def test_values_keep_their_types_and_orders(value: Any) -> None:
    assert exact(codec.from_value(over_the_wire(codec.to_value(value)))) == exact(value)


@FEW
@given(MESSAGES)
def test_messages_round_trip(message: Message) -> None:
    assert exact(codec.from_message(over_the_wire(codec.to_message(message)))) == exact(message)


@FEW
@given(STEPS, st.integers(0, 2**40))
def test_steps_round_trip(step: Step, turn: int) -> None:
    reply = over_the_wire(codec.to_step("s", turn, step))
    assert (reply.session, reply.turn) == ("s", turn)
    assert exact(codec.from_step(reply)) == exact(step)


@FEW
@given(AGENTS)
def test_observations_round_trip(observations: dict[str, tuple[Message, ...]]) -> None:
    sent = pb.OpenReply(observations=codec.to_observations(observations))
    assert exact(codec.from_observations(over_the_wire(sent).observations)) == exact(observations)


@FEW
@given(st.dictionaries(TEXTS, MESSAGES, max_size=3))
def test_actions_round_trip(actions: dict[str, Message]) -> None:
    sent = pb.StepRequest(actions=codec.to_actions(actions))
    assert exact(codec.from_actions(over_the_wire(sent).actions)) == exact(actions)


@FEW
@given(st.builds(Task, TEXTS, TEXTS, st.integers(0, 2**40), st.integers(), MAPS))
def test_tasks_round_trip(task: Task) -> None:
    assert exact(codec.from_task(over_the_wire(codec.to_task(task)))) == exact(task)


@FEW
@given(st.lists(st.builds(ToolSchema, TEXTS, TEXTS, MAPS), max_size=3).map(tuple))
def test_schemas_of_tools_round_trip(tools: tuple[ToolSchema, ...]) -> None:
    sent = pb.AgentTools(tools=codec.to_tools(tools))
    assert exact(codec.from_tools(over_the_wire(sent).tools)) == exact(tools)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "boolean"),
        (False, "boolean"),
        (0, "integer"),
        (2**63 - 1, "integer"),
        (-(2**63), "integer"),
        (2**63, "large_integer"),
        (-(2**63) - 1, "large_integer"),
        (10**400, "large_integer"),
        (0.0, "number"),
        (-0.0, "number"),
        (5e-324, "number"),
        (math.inf, "number"),
        ("", "text"),
        (b"", "data"),
        ([], "list"),
        ({}, "map"),
    ],
)
def test_each_type_has_a_kind(value: Any, kind: str) -> None:
    sent = over_the_wire(codec.to_value(value))
    assert sent.WhichOneof("kind") == kind
    assert exact(codec.from_value(sent)) == exact(value)


def test_nan_stays_nan() -> None:
    assert math.isnan(codec.from_value(codec.to_value(math.nan)))


def test_tuples_become_lists_as_in_json() -> None:
    value = {"a": (1, (2, "x")), "b": ()}
    assert codec.from_value(codec.to_value(value)) == json.loads(json.dumps(value))


def test_the_order_of_keys_is_kept() -> None:
    keys = ["z", "a", "é", "10", "9", ""]
    assert list(codec.from_map(over_the_wire(codec.to_map(dict.fromkeys(keys, 0))))) == keys


def test_halves_of_characters_are_replaced() -> None:
    assert codec.from_message(over_the_wire(codec.to_message(Message("user", "a\ud83db")))).content == "a?b"
    assert codec.from_value(over_the_wire(codec.to_value({"\udc00": "\ud800"}))) == {"?": "?"}


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({1: 2}, "key 1 is no text"),
        ({"a": {None: 2}}, "key None is no text"),
        ([object()], "type object"),
        ({1, 2}, "type set"),
        (1j, "type complex"),
        (bytearray(b"x"), "type bytearray"),
    ],
)
def test_what_has_no_form_is_refused(value: Any, fault: str) -> None:
    with pytest.raises(RemoteError, match=fault):
        codec.to_value(value)


def test_an_integer_beyond_pythons_own_limit_is_refused() -> None:
    with pytest.raises(RemoteError, match="16610 bits"):
        codec.to_value(10**5000)


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["lists", "maps"])
def test_the_deepest_nesting_fits_into_the_deepest_message(wrap: Any) -> None:
    deepest = next(depth for depth in range(99, 0, -1) if encodes(nested(depth, wrap)))
    assert deepest >= 25
    value = nested(deepest, wrap)
    message = Message("assistant", "", (ToolCall("i", "n", {"a": value}),))
    request = pb.StepRequest(session="s", actions=codec.to_actions({"agent": message}))
    operation = over_the_wire(pb.BatchRequest(operations=[pb.Operation(step=request)])).operations[0]
    assert codec.from_actions(operation.step.actions) == {"agent": message}
    step = Step(observations={"agent": (message,)})
    reply = pb.BatchReply(results=[pb.Result(step=codec.to_step("s", 0, step))])
    assert codec.from_step(over_the_wire(reply).results[0].step).observations == {"agent": (message,)}
    schema = ToolSchema("n", "d", {"a": value})
    opened = pb.OpenReply(tools=[pb.AgentTools(tools=codec.to_tools([schema]))])
    reply = over_the_wire(pb.BatchReply(results=[pb.Result(open=opened)]))
    assert codec.from_tools(reply.results[0].open.tools[0].tools) == (schema,)
    with pytest.raises(RemoteError, match="too deep"):
        codec.to_value(nested(deepest + 1, wrap))


def encodes(value: Any) -> bool:
    try:
        codec.to_map({"a": value})
    except RemoteError:
        return False
    return True


@pytest.mark.parametrize(
    ("decode", "message", "fault"),
    [
        (codec.from_value, pb.Value(), "without a kind"),
        (codec.from_value, pb.Value(list=pb.List(items=[pb.Value()])), "without a kind"),
        (codec.from_value, pb.Value(large_integer="1e5"), "'1e5' is no integer"),
        (codec.from_value, pb.Value(large_integer="9" * 5000), "is no integer"),
        (codec.from_map, pb.Map(entries=[pb.Entry(key="a")]), "without a kind"),
        (codec.from_map, pb.Map(entries=[pb.Entry(key="a", value=pb.Value(null=True))] * 2), "'a' comes twice"),
        (codec.from_message, pb.Message(role="root"), "role is 'root'"),
        (codec.from_message, pb.Message(), "role is ''"),
        (codec.from_task, pb.Task(seed="x"), "seed 'x' is no integer"),
        (codec.from_actions, [pb.AgentAction(agent="b", message=pb.Message(role="user"))] * 2, "'b' comes twice"),
        (codec.from_observations, [pb.AgentMessages(agent="b")] * 2, "'b' comes twice"),
    ],
)
def test_malformed_messages_are_refused(decode: Any, message: Any, fault: str) -> None:
    with pytest.raises(RemoteError, match=fault):
        decode(message)
