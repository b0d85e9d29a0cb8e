from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrlm_pl.episode import SCHEMA, Episode, Message, Task, ToolCall, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes, write_episodes
from mrlm_pl.errors import EnvironmentContractError

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(st.none() | st.booleans() | st.integers() | finite | st.text(), st.lists, max_leaves=5)
calls = st.builds(ToolCall, st.text(), st.text(), st.dictionaries(st.text(), json_values, max_size=2))
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.text(),
    st.lists(calls, max_size=2).map(tuple),
    st.none() | st.text(),
    st.none() | st.text(),
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 6))

    def row(elements: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(elements, min_size=length, max_size=length)))

    turn = st.builds(
        Turn,
        st.just("a"),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
        finite,
        st.dictionaries(st.text(), finite, max_size=2),
        st.sampled_from(["stop", "length"]),
        st.text(),
        st.integers(0, 9),
        st.text(),
    )
    return Trajectory(
        "a",
        draw(st.text()),
        row(st.integers(0, 10**6)),
        row(st.booleans()),
        row(finite),
        tuple(draw(st.lists(turn, max_size=2))),
        tuple(draw(st.lists(messages, max_size=2))),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trajectories(), finite, st.none() | st.booleans(), st.none() | st.text(), st.dictionaries(st.text(), json_values)
)
def test_json_loses_nothing(
    row: Trajectory, number: float, success: bool | None, error: str | None, data: dict
) -> None:
    episode = Episode(
        "id",
        Task("e", "train", 1, 2, data),
        "g",
        3,
        4,
        {"a": (row, row)},
        "end",
        success=success,
        metrics={"m": number},
        error=error,
    )
    text = episode.to_json()
    assert "\n" not in text
    assert Episode.from_json(text) == episode


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_has_not_are_refused(number: float) -> None:
    turn = Turn("a", 0, 0, 1, 0.0, {}, "stop", "main", 0, "e")
    row = Trajectory("a", "main", (1,), (True,), (-0.5,), (turn,))
    call = Message("assistant", "", (ToolCall("0", "t", {"x": [number]}),))
    whole = Episode("id", Task("e", "train", 1), "g", 3, 4, {"a": (row,)}, "end")
    assert Episode.from_json(whole.to_json()) == whole
    rows = [
        replace(row, logprobs=(number,)),
        replace(row, messages=(call,)),
        *(replace(row, turns=(replace(turn, **{name: number}),)) for name in ("reward", "return_", "baseline")),
        replace(row, turns=(replace(turn, components={"c": number}),)),
    ]
    episodes = [
        *(replace(whole, trajectories={"a": (changed,)}) for changed in rows),
        *(replace(whole, **{name: {"m": number}}) for name in ("metrics", "timings")),
        replace(whole, step_rewards=({"a": number},)),
        replace(whole, task=Task("e", "train", 1, data={"n": number})),
    ]
    for episode in episodes:
        with pytest.raises(ValueError, match="not JSON compliant"):
            episode.to_json()
    with pytest.raises(ValueError, match=r"the data of task e/train/1 is not JSON: .*; give None for a missing number"):
        episodes[-1].to_json()


@pytest.mark.parametrize("wrap", [lambda arguments: arguments, lambda arguments: {"nested": [arguments]}])
@pytest.mark.parametrize("node", ["", "root"])
@pytest.mark.parametrize(
    ("key", "expected"), [(None, "null"), (True, "true"), (1.5, "1.5"), (1e16, "1e+16"), (7, "7"), ("k", "k")]
)
def test_keys_of_arguments_become_those_of_json(
    key: object, expected: str, node: str, wrap: Any, tmp_path: Path
) -> None:
    write_episodes(tmp_path / "e.jsonl.zst", [calling(wrap({key: 1}), node)])
    (read,) = read_episodes(tmp_path / "e.jsonl.zst")
    assert read.rows()[0].messages[0].tool_calls[0].arguments == wrap({expected: 1})


@pytest.mark.parametrize("node", ["", "root"])
@pytest.mark.parametrize(
    ("key", "error", "fault"),
    [
        (b"x", TypeError, "keys must be str, int, float, bool or None, not bytes"),
        ((1,), TypeError, "keys must be str, int, float, bool or None, not tuple"),
        (float("nan"), ValueError, "not JSON compliant"),
    ],
)
def test_keys_that_json_has_not_are_refused(
    key: object, error: type[Exception], fault: str, node: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=fault):
        write_episodes(tmp_path / "e.jsonl.zst", [calling({key: 1}, node)])


def calling(arguments: Any, node: str) -> Episode:
    """Return an episode with one tool call, of a turn tree if there is a ``node``."""
    call = Message("assistant", "", (ToolCall("0", "t", arguments),))
    turn = Turn("a", 0, 0, 1, 0.0, {}, "stop", "main", 0, "e", node=node)
    row = Trajectory("a", "main", (1,), (True,), (-0.5,), (turn,), (call,))
    return Episode("id", Task("e", "train", 1), "g", 3, 4, {"a": (row,)}, "end")


def test_a_lone_surrogate_in_a_turn_tree_stays(tmp_path: Path) -> None:
    episode = calling({"text": "\ud800"}, "root")
    write_episodes(tmp_path / "e.jsonl.zst", [episode])
    assert list(read_episodes(tmp_path)) == [episode]


def test_lone_surrogates_and_large_integers_stay(tmp_path: Path) -> None:
    for text in ("\ud800", "\u00e9"):
        for data in ({"n": 10**30}, {"n": text}):
            row = Trajectory("a", "main", (), (), (), (), (Message("user", text),))
            episode = Episode("id", Task("e", "train", 1, data=data), "g", 3, 4, {"a": (row,)}, "end")
            write_episodes(tmp_path / "e.jsonl.gz", [episode])
            assert list(read_episodes(tmp_path)) == [episode]


def test_numbers_of_other_libraries_become_plain() -> None:
    episode = Episode("id", Task("e", "train", 1), "g", 3, 4, {}, "end", metrics={"m": np.float64(0.1)})
    assert Episode.from_json(episode.to_json()) == episode
    with pytest.raises(EnvironmentContractError, match="JSON has no such value; let the data"):
        Episode("id", Task("e", "train", 1, 0, {"x": 1j}), "g", 3, 4, {}, "end").to_json()


@pytest.mark.parametrize("value", [{1, 3}, b"x", Decimal("1.5"), {"deep": [{2}]}])
def test_data_that_json_would_change_is_refused(value: object) -> None:
    with pytest.raises(EnvironmentContractError, match="JSON has no such value; let the data"):
        Episode("id", Task("e", "train", 1, 0, {"x": value}), "g", 3, 4, {}, "end").to_json()


@pytest.mark.parametrize("text", ["[1]", "3", "null", '"x"'])
def test_a_record_is_a_mapping(text: str) -> None:
    with pytest.raises(ValueError, match="an episode record is a mapping, and not "):
        Episode.from_json(text)


def test_a_missing_field_is_named_and_a_newer_one_ignored() -> None:
    episode = Episode("id", Task("e", "train", 1), "g", 3, 4, {}, "end")
    data = json.loads(episode.to_json())
    assert data["schema"] == SCHEMA
    data["newer"] = data["task"]["newer"] = 1
    assert Episode.from_dict(data) == episode
    del data["group"]
    with pytest.raises(ValueError, match="'id': Object missing required field `group`"):
        Episode.from_dict(data)


def test_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 1, 2"):
        Trajectory("a", "p", (1, 2), (True,), (0.0, 0.0), ())


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("<think>a</think>b<think>c</think>\n\nd", "d"),
        ("<think>a</think>\nsplit('</think>')", "split('</think>')"),
        ('x = """</think>"""', 'x = """</think>"""'),
        ("Ends with `</think>`.</think>b", "b"),
        ("<think>\"a\"</think>'b'", "'b'"),
        ("<think>a</think> \n", " \n"),
        ("<think>a", ""),
        ("", ""),
    ],
)
def test_the_final_text_follows_the_last_end_of_reasoning_that_is_not_quoted(reply: str, text: str) -> None:
    assert Message("assistant", reply).final_text == text


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'robot'"):
        Message("robot", "x")  # type: ignore[arg-type]


def test_rewards_are_sums_over_turns_and_means_over_agents() -> None:
    def row(agent: str, *rewards: float) -> Trajectory:
        turns = tuple(Turn(agent, n, 0, 0, r, {"x": r}, "stop", "p", 0, "e") for n, r in enumerate(rewards))
        return Trajectory(agent, "p", (), (), (), turns)

    episode = Episode("id", Task("e", "train", 1), "g", 3, 4, {"a": (row("a", 1, 2),), "b": (row("b", 5),)}, "end")
    assert episode.rewards() == {"a": 3.0, "b": 5.0}
    assert episode.reward == 4.0
    assert episode.components() == {"x": 4.0}


def test_tool_messages_have_the_fields_of_chat_templates() -> None:
    call = ToolCall("1", "add", {"x": 2})
    assert Message("assistant", "", (call,)).to_chat()["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 2}}}
    ]
    answer = Message("tool", "4", tool_call_id="1", name="add").to_chat()
    assert answer == {"role": "tool", "content": "4", "tool_call_id": "1", "name": "add"}
