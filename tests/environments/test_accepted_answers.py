"""Exact match and F1 against torchmetrics' SQuAD."""

from __future__ import annotations

from typing import Any

import pytest
from mrlm_environments import exact_match, token_f1
from torchmetrics.functional.text import squad

from mrlm_pl.errors import DataError


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("the Eiffel Tower.", ["Louvre", "eiffel  tower"]),
        ("Paris, France", ["Paris"]),
        ("14 December 1972 UTC", ["December 14, 1972", "14 December 1972"]),
        ("a man and a woman", ["man and woman", "An apple"]),
        ("Anna", ["an na", "Theanna"]),
        ("U.S.A.", ["usa"]),
        ("yes yes yes", ["yes yes no"]),
        ("nothing", ["else"]),
        ("the", ["a"]),
        ("the", ["word"]),
        ("word", ["..."]),
    ],
)
def test_answers_are_scored_as_by_squad(given: str, accepted: list[str]) -> None:
    expected = squad(
        {"prediction_text": given, "id": "0"},
        {"answers": {"answer_start": [0] * len(accepted), "text": accepted}, "id": "0"},
    )
    reply = f"<think><answer>no</answer></think>So <answer>{given}</answer>"
    assert 100 * exact_match(reply, {"golden_answers": accepted}) == pytest.approx(float(expected["exact_match"]))
    assert 100 * token_f1(reply, {"answer": accepted}) == pytest.approx(float(expected["f1"]))


@pytest.mark.parametrize("reply", ["Paris", "", "<answer>Paris", "<think><answer>Paris</answer>"])
def test_a_reply_without_an_answer_earns_nothing(reply: str) -> None:
    assert exact_match(reply, {"answer": "Paris"}) == token_f1(reply, {"answer": "Paris"}) == 0.0
    assert exact_match("<answer></answer>", {"answer": "Paris"}) == 0.0


def test_the_accepted_answers_are_a_text_or_a_list() -> None:
    assert exact_match("<answer>Paris</answer>", {"answer": "Paris", "golden_answers": ["Rome"]}) == 0.0
    assert exact_match("<answer>Paris</answer>", {"answer": "Paris"}) == 1.0


@pytest.mark.parametrize("function", [exact_match, token_f1])
@pytest.mark.parametrize(
    "row", [{"question": "?"}, {"golden_answers": None}, {"golden_answers": []}, {"answer": 7}, {"answer": ["7", 7]}]
)
@pytest.mark.parametrize("reply", ["<answer>7</answer>", "no answer"])
def test_a_row_without_accepted_answers_is_named(function: Any, row: dict[str, Any], reply: str) -> None:
    with pytest.raises(
        DataError, match=r"the accepted answers of the row \{.*\} are .*; give a text or a list of texts"
    ):
        function(reply, row)
