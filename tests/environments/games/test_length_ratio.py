from __future__ import annotations

from typing import Any

import pytest
from mrlm_environments.games.length_ratio import LengthRatioGame

from mrlm_pl.cli.main import main
from mrlm_pl.environment import Message, Step
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError


def played(*rounds: tuple[str, str], **options: Any) -> list[Step]:
    game = LengthRatioGame(rounds=len(rounds), **options)
    game.reset(game.tasks("train")[0])
    return [
        game.step({"first": Message("assistant", first), "second": Message("assistant", second)})
        for first, second in rounds
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (10, 20, 1.0),
        (10, 25, 1.0),
        (10, 30, 1.0),
        (10, 10, 0.5),
        (10, 5, 0.25),
        (10, 15, 0.75),
        (10, 45, 0.5),
        (10, 54, 0.2),
        (10, 60, 0.0),
        (10, 1000, 0.0),
        (4, 8, 1.0),
        (3, 8, 0.0),
        (8, 3, 0.0),
        (0, 8, 0.0),
        (0, 0, 0.0),
    ],
)
def test_pay_by_the_ratio_of_lengths(first: int, second: int, expected: float) -> None:
    (step,) = played(("x" * first, "y" * second))
    assert step.rewards == pytest.approx({"first": expected, "second": expected})
    assert step.components["second"] == {"ratio": step.rewards["second"]}
    assert step.success is (expected == 1.0)


def test_the_band_and_the_fewest_characters_are_options() -> None:
    assert played(("x" * 10, "y" * 5), target=(0.5, 0.5))[0].rewards["first"] == 1.0
    assert played(("x" * 10, "y" * 8), target=(0.5, 0.5))[0].rewards["first"] == pytest.approx(0.4)
    assert played(("x" * 10, "y" * 20), minimum=11)[0].rewards["first"] == 0.0


def test_white_space_around_a_text_does_not_count() -> None:
    assert played(("x" * 10, "y" * 10 + " \n" * 5))[0].rewards["first"] == 0.5


def test_every_round_pays_and_both_learn_both_lengths() -> None:
    first, second = played(("x" * 10, "y" * 10), ("x" * 10, "y" * 20))
    assert (first.rewards["first"], second.rewards["first"]) == (0.5, 1.0)
    assert (first.done, second.done, second.stop_reason) == (False, True, "rounds")
    for messages in first.observations.values():
        assert messages[0].content == "The first text had 10 characters, the second 10. Write again."
    assert first.metrics == {"first_characters": 10.0, "second_characters": 10.0}


def test_the_two_writers_are_told_which_they_are() -> None:
    game = LengthRatioGame()
    task = game.tasks("train")[0]
    told = {agent: messages[0].content for agent, messages in game.reset(task).items()}
    assert told == {agent: f"You are the {agent} writer. Topic: {task.data['topic']}." for agent in ("first", "second")}


@pytest.mark.parametrize(
    "options", [{}, {"rounds": 1}, {"target": (0.2, 0.3)}, {"target": (2.5, 2.5), "rounds": 5}, {"minimum": 50}]
)
def test_the_contract_is_kept(options: dict[str, Any]) -> None:
    game = LengthRatioGame(**options)
    assert game.gold(game.tasks("train")[0]) is not None
    check_environment(game).raise_on_failure()


def test_check_env_finds_it_by_name() -> None:
    assert main(["check-env", "length_ratio"]) == 0


def test_a_band_that_no_lengths_meet_has_no_best_replies() -> None:
    game = LengthRatioGame(target=(9_000.0, 9_000.0))
    assert game.gold(game.tasks("train")[0]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": (3.0, 2.0)}, "lowest, highest"),
        ({"target": (0.0, 2.0)}, "above 0"),
        ({"target": (1.0, float("inf"))}, "lowest, highest"),
        ({"target": (1.0,)}, "lowest, highest"),
        ({"rounds": 0}, "1 or above"),
        ({"minimum": 0}, "from 1 to 10000"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LengthRatioGame(**options)


def test_a_text_counts_ten_thousand_characters_at_most() -> None:
    (step,) = played(("x" * 10_000, "y" * 5_000_000))
    assert step.rewards["first"] == 0.5
    assert step.metrics["second_characters"] == 10_000.0
