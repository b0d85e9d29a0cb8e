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
from mrlm_pl.serving.environments.service import settings_of
from mrlm_pl.serving.transport import codec
from mrlm_pl.serving.transport import environment_pb2 as pb

TOOLS = dict[str, tuple[ToolSchema, ...]]
FEW = settings(max_examples=15, deadline=None)  # the machine may be busy
TEXTS = st.text(max_size=12)
NUMBERS = st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-(2**80), 2**80) | NUMBERS | TEXTS
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
REWARDS = st.dictionaries(
    TEXTS, st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans(), max_size=3
)
STEPS = st.builds(
    Step,
    AGENTS,
    REWARDS,
    st.dictionaries(TEXTS, REWARDS, max_size=3),
    st.booleans(),
    TEXTS,
    st.booleans(),
    st.none() | st.booleans(),
    AMOUNTS,
)


def exact(value: Any) -> str:
    """A text that tells values, types and orders apart; ``True == 1 == 1.0`` to Python."""
    return repr(value)


def read(content: bytes, kind: Any) -> Any:
    return codec.step_from(content) if kind is Step else codec.from_json(content, kind)


def through_json(value: Any, kind: Any = Any) -> Any:
    return read(codec.to_json(value), kind)


@FEW
@given(VALUES)
def test_values_keep_their_types_and_orders(value: Any) -> None:
    assert exact(through_json(value)) == exact(value)


@FEW
@given(st.lists(MESSAGES, max_size=3).map(tuple))
def test_messages_round_trip(messages: tuple[Message, ...]) -> None:
    assert exact(through_json(messages, tuple[Message, ...])) == exact(messages)


@FEW
@given(STEPS)
def test_steps_round_trip(step: Step) -> None:
    assert exact(through_json(step, Step)) == exact(step)


@FEW
@given(AGENTS)
def test_observations_round_trip(observations: dict[str, tuple[Message, ...]]) -> None:
    assert exact(through_json(observations, dict[str, tuple[Message, ...]])) == exact(observations)


@FEW
@given(st.dictionaries(TEXTS, MESSAGES, max_size=3))
def test_actions_round_trip(actions: dict[str, Message]) -> None:
    assert exact(through_json(actions, dict[str, Message])) == exact(actions)


@FEW
@given(st.builds(Task, TEXTS, TEXTS, st.integers(0, 2**40), st.integers(), MAPS))
def test_tasks_round_trip(task: Task) -> None:
    assert exact(through_json(task, Task)) == exact(task)


@FEW
@given(st.dictionaries(TEXTS, st.lists(st.builds(ToolSchema, TEXTS, TEXTS, MAPS), max_size=3).map(tuple), max_size=2))
def test_schemas_of_tools_round_trip(tools: TOOLS) -> None:
    assert exact(through_json(tools, TOOLS)) == exact(tools)


@pytest.mark.parametrize("value", [True, 0, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 5e-324, math.inf, "", [], {}])
def test_each_type_is_kept(value: Any) -> None:
    assert exact(through_json(value)) == exact(value)


def test_nan_stays_nan() -> None:
    assert math.isnan(through_json(math.nan))


def test_tuples_become_lists_as_in_json() -> None:
    value = {"a": (1, (2, "x")), "b": ()}
    assert through_json(value) == json.loads(json.dumps(value))


def test_the_order_of_keys_is_kept() -> None:
    keys = ["z", "a", "é", "10", "9", ""]
    assert list(through_json(dict.fromkeys(keys, 0))) == keys


def test_lone_surrogates_are_kept() -> None:
    assert through_json({"\udc00": "a\ud83db"}) == {"\udc00": "a\ud83db"}


def test_settings_may_be_empty() -> None:
    assert settings_of(pb.OpenRequest()) == {}


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({1: 2}, "key 1 is not text"),
        ({"a": {None: 2}}, "key None is not text"),
        (Message("user", "", (ToolCall("i", "n", {"a": {1: 2}}),)), "key 1 is not text"),
        ([object()], "type object"),
        ({1, 2}, "type set"),
        (1j, "type complex"),
        (b"x", "type bytes"),
    ],
)
def test_what_has_no_form_is_refused(value: Any, fault: str) -> None:
    with pytest.raises(RemoteError, match=fault):
        codec.to_json(value)


def test_an_integer_beyond_pythons_own_limit_is_refused() -> None:
    with pytest.raises(RemoteError, match="4300 digits"):
        codec.to_json(10**5000)


def test_nesting_without_end_is_refused() -> None:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RemoteError, match="recursion"):
        codec.to_json(value)
    with pytest.raises(RemoteError, match="recursion"):
        codec.from_json(b"[" * 100_000, list)


def task(**values: str) -> bytes:
    """Return a task with these values, each in JSON."""
    values = {"environment": '"e"', "split": '"s"', "index": "0", "seed": "0", "data": "{}", **values}
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}").encode()


@pytest.mark.parametrize(
    ("kind", "content", "fault"),
    [
        (dict, b"", "malformed content"),
        (dict, b"\xff", "malformed content"),
        (dict, b"[1]", "malformed content"),
        (dict, b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (tuple[Message, ...], b'[{"role": "root", "content": ""}]', r"enum value 'root' - at `\$\[0\]\.role`"),
        (tuple[Message, ...], b'[{"role": "user", "content": 1}]', "Expected `str`, got `int`"),
        (tuple[Message, ...], b'["x"]', "malformed content"),
        (Task, task(seed='"x"'), r"Expected `int`, got `str` - at `\$\.seed`"),
        (Task, task(index="Infinity"), r"Expected `int`, got `float` - at `\$\.index`"),
        (Task, task(index="1.5"), r"at `\$\.index`"),
        (Task, task(data="[]"), r"at `\$\.data`"),
        (dict[str, Message], b'["agent"]', "malformed content"),
        (dict[str, tuple[Message, ...]], b"[]", "malformed content"),
        (
            TOOLS,
            b'{"a": [{"name": 3, "description": ""}]}',
            r"Expected `str`, got `int` - at .*\.name`",
        ),
        (TOOLS, b'{"a": [{"name": "n"}]}', "missing required field `description`"),
        (Step, b"{}", "missing required field `observations`"),
        (Step, b'{"observations": {}, "rewards": {"a": "x"}}', r"got `str` - at `\$\.rewards"),
        (Step, b'{"observations": {}, "rewards": {"a": NaN}}', "the reward 'a' is nan"),
        (Step, b'{"observations": {}, "components": {"a": {"b": -Infinity}}}', "the reward 'b' is -inf"),
        (Step, b'{"observations": {}, "rewards": {"a": 1' + b"0" * 400 + b"}}", "OverflowError"),
        (Step, b'{"observations": {}, "done": "yes"}', r"Expected `bool`, got `str` - at `\$\.done`"),
        (Step, b'{"observations": {}, "success": 1}', r"at `\$\.success`"),
        (Step, b'{"observations": {}, "observations": {}}', "the key 'observations' comes twice"),
        (dict, b'{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' comes twice"),
    ],
)
def test_malformed_content_is_refused(kind: Any, content: bytes, fault: str) -> None:
    with pytest.raises(RemoteError, match=fault):
        read(content, kind)


def test_settings_are_an_object() -> None:
    with pytest.raises(RemoteError, match="malformed content"):
        settings_of(pb.OpenRequest(settings=b'[["a", 1]]'))


def test_fields_of_newer_versions_are_ignored() -> None:
    step = codec.step_from(b'{"observations": {}, "newer": [1], "done": true}')
    assert exact(step) == exact(Step({}, done=True))
    assert codec.from_json(task(newer="1"), Task) == Task("e", "s", 0)
    tools = codec.from_json(b'{"a": [{"name": "n", "description": "d", "newer": 1}]}', TOOLS)
    assert tools == {"a": (ToolSchema("n", "d"),)}


def test_lone_surrogates_and_large_integers_are_kept_in_records() -> None:
    step = Step({"\udc00": (Message("user", "\ud83d"),)}, {"\udc00": 2**80}, stop_reason="\udc01")
    assert exact(through_json(step, Step)) == exact(step)
    made = Task("\udc00", "s", 2**70, -(2**90), {"\udc00": ["\udc01", 2**100]})
    assert exact(through_json(made, Task)) == exact(made)
