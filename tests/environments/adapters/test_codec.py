"""Spaces as text: sampled values come back, faults are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mrlm_environments import IllegalActionError, TextCodec

from mrlm_pl.errors import ConfigurationError

spaces = pytest.importorskip("gymnasium.spaces", reason="gymnasium is not installed")

VECTORS = [
    spaces.MultiDiscrete([2, 3, 5]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, -3]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Box(-2.0, 2.0, (3,), np.float64),
    spaces.Box(0, 255, (2, 2), np.uint8),
]


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("2", 2),
        ("not 0 but 1.", 1),
        ("<action>3</action> rather than 0", 3),
        ("<action>0</action> no, <action> 2", 2),
        ("1, that is 7", None),
        ("2.5", None),
        ("-1", None),
        ("", None),
        ("3" * 5000, None),
        ("two", None),
    ],
)
def test_a_discrete_action_is_the_last_number(reply: str, action: int | None) -> None:
    if action is None:
        with pytest.raises(IllegalActionError):
            TextCodec().action(reply, spaces.Discrete(4))
    else:
        assert TextCodec().action(reply, spaces.Discrete(4)) == action


def test_names_of_actions_are_whole_words_in_any_case() -> None:
    codec, space = TextCodec(["up", "up left", "c++"]), spaces.Discrete(3, start=5)
    assert [codec.action(reply, space) for reply in ("UP", "left? up left!", "in C++", "upper up")] == [5, 6, 7, 5]
    assert codec.instructions(space) == "Reply with one of the actions up, up left, c++."
    with pytest.raises(IllegalActionError, match="names no action"):
        codec.action("upper 5", space)


def test_a_masked_action_is_illegal_and_the_legal_ones_are_shown() -> None:
    codec, space, mask = TextCodec(), spaces.Discrete(4, start=10), np.array([0, 1, 0, 1], np.int8)
    assert codec.action("13", space, mask) == 13
    assert codec.choices(space, mask) == "Legal actions: 11, 13"
    assert codec.choices(space, None) == ""
    with pytest.raises(IllegalActionError, match=r"10 is not legal\. Legal actions: 11, 13"):
        codec.action("10", space, mask)


@pytest.mark.parametrize("space", VECTORS, ids=str)
def test_a_vector_comes_back_from_its_text(space: Any) -> None:
    space.seed(3)
    codec = TextCodec(digits=17)
    for _ in range(20):
        value = space.sample()
        again = codec.action(codec.observation(value, ""), space)
        assert again.dtype == value.dtype
        assert np.array_equal(again, value)


@pytest.mark.parametrize(
    ("space", "reply", "action"),
    [
        (VECTORS[0], "1 1 1 2 4", [1, 2, 4]),
        (VECTORS[0], "I weighed 3 options. Step 1: go right.\n0 2 1", [0, 2, 1]),
        (VECTORS[1], "Of 4: 0, 1, 2, -3", [[0, 1], [2, -3]]),
        (VECTORS[2], "<action>1: 0 1 0 1</action> 0", [0, 1, 0, 1]),
        (VECTORS[4], "See fig.7: .5 -.25 +.125", [0.5, -0.25, 0.125]),
    ],
    ids=str,
)
def test_a_vector_is_the_last_numbers(space: Any, reply: str, action: list[Any]) -> None:
    assert TextCodec().action(reply, space).tolist() == action


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([3, 2]), *VECTORS[1:3]], ids=str)
def test_the_mask_of_a_vector_needs_a_codec_of_its_own(space: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)action_mask .* has no text form; give your own codec"):
        TextCodec().choices(space, np.ones(4, np.int8))


@pytest.mark.parametrize(
    ("space", "reply"),
    [
        (VECTORS[0], "1 1"),
        (VECTORS[0], "1 3 1"),
        (VECTORS[0], "1 1.5 1"),
        (VECTORS[0], "1 1 1 0.1234567890123456789012"),
        (VECTORS[2], "0 1 2 0"),
        (VECTORS[4], "0 0 2.1"),
        (VECTORS[5], "0 0 0 300"),
        (VECTORS[5], "0 0 0 1e20"),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), "1e39"),  # infinite in 32 bits: so might be its reward
        (spaces.Text(3), "abcd"),
        (spaces.Text(3), ""),
    ],
    ids=str,
)
def test_other_replies_are_illegal_and_say_what_is_legal(space: Any, reply: str) -> None:
    with pytest.raises(IllegalActionError, match=r"^Your reply is no legal action\. Reply with "):
        TextCodec().action(reply, space)


def test_a_text_is_the_whole_reply() -> None:
    assert TextCodec().action(" ab1 \n", spaces.Text(5)) == "ab1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (np.int64(7), "7"),
        ("The \x1b[41mS\x1b[0mtart\n", "The [S]tart"),
        ((13, 10, True), "13, 10, 1"),
        (np.array([0.0273956, -1234.5, 2.0], np.float32), "0.0274 -1.23e+03 2"),
        (np.array([[1, 2], [3, 4]]), "1 2\n3 4"),
        (np.array([[[5, 2]], [[3, 4]]]), "5 2\n\n3 4"),
        (np.eye(3, dtype=np.int8)[[[0, 1], [2, 2]]][..., :2], "1 2\n0 0"),
        ({"place": np.array([1, 2]), "name": "a"}, "place: 1 2\nname: a"),
    ],
    ids=str,
)
def test_observations_are_readable(value: Any, text: str) -> None:
    assert TextCodec().observation(value, "agent") == text


def test_what_has_no_text_form_asks_for_a_codec() -> None:
    with pytest.raises(ConfigurationError, match=r"100800 numbers .*give your own codec"):
        TextCodec().observation(np.zeros((210, 160, 3)), "agent")
    with pytest.raises(ConfigurationError, match="no text form; give your own codec"):
        TextCodec().instructions(spaces.Sequence(spaces.Discrete(2)))
    with pytest.raises(ConfigurationError, match="has 2 names; give 3"):
        TextCodec(["a", "b"]).instructions(spaces.Discrete(3))
    with pytest.raises(ConfigurationError, match="different names"):
        TextCodec(["a", "A"])


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Discrete(3), "Reply with one of the actions 0, 1, 2."),
        (spaces.Discrete(30, start=1), "Reply with an action from 1 to 30."),
        (VECTORS[0], "Reply with 3 numbers from 0 to 1 2 4."),
        (VECTORS[2], "Reply with 4 numbers from 0 to 1."),
        (VECTORS[4], "Reply with 3 numbers from -2 to 2."),
        (spaces.Text(9), "Reply with 1 to 9 characters."),
    ],
    ids=str,
)
def test_instructions_say_how_to_reply(space: Any, text: str) -> None:
    assert TextCodec().instructions(space) == text
