"""Influence rewards and incentives: the reference's numbers, and those of incomplete discussions."""

from __future__ import annotations

from typing import Any

import pytest

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.rewards import INCENTIVES, incentive_signs, incentives, influence_rewards


def score_table(rows: list[list[float]], persons: list[str]) -> list[dict[str, float]]:
    return [dict(zip(persons, row, strict=True)) for row in rows]


TWO = score_table([[0.2, 0.9], [0.8, 0.6], [1.0, 0.5]], ["a", "b"])
ZERO = {"a": 0.0, "b": 0.0, "c": 0.0}


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [list(turn) for turn in found] == [list(turn) for turn in expected]
    for turn, wanted in zip(found, expected, strict=True):
        assert turn == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("reward", "horizon", "expected"),
    [
        ("team", "discounted_sum", [(0.343525, 0.847122), (0.788462, 0.634615), (1.0, 0.5)]),
        ("own", "discounted_sum", [(0.381295, 0.809352), (0.846154, 0.576923), (1.0, 0.5)]),
        ("team", "last", [(0.75, 0.75)] * 3),
        ("own", "last", [(1.0, 0.5)] * 3),
        ("team", "current", [(0.55, 0.55), (0.7, 0.7), (0.75, 0.75)]),
        ("own", "current", [(0.2, 0.9), (0.8, 0.6), (1.0, 0.5)]),
    ],
)
def test_the_rewards_of_two_persons_and_three_turns(reward: Any, horizon: Any, expected: list[Any]) -> None:
    found = influence_rewards(TWO, 0.3, reward, horizon)
    assert_close(found, [{"a": first, "b": second} for first, second in expected])


def test_the_rewards_of_three_persons() -> None:
    table = score_table([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], ["a", "b", "c"])
    assert_close(influence_rewards(table, 0.3)[:1], [{"a": 0.923077, "b": 0.153846, "c": 0.153846}])


def test_a_discussion_that_ended_early_has_no_later_turns() -> None:
    # (0.2 + 0.3 * 0.7) / 1.3 and (0.9 + 0.3 * 0.7) / 1.3
    assert_close(influence_rewards(TWO[:2], 0.3), [{"a": 0.315385, "b": 0.853846}, {"a": 0.8, "b": 0.6}])


@pytest.mark.parametrize("reward", ["team", "own"])
@pytest.mark.parametrize("horizon", ["discounted_sum", "last"])
def test_a_single_turn_pays_what_it_is_worth(reward: Any, horizon: Any) -> None:
    assert_close(influence_rewards([{"a": 0.4}], 0.9, reward, horizon), [{"a": 0.4}])
    together = {"a": 0.4, "b": 0.8}
    expected = {"a": 0.6, "b": 0.6} if (reward, horizon) == ("team", "last") else together
    assert_close(influence_rewards([together], 0.9, reward, horizon), [expected])


def test_without_discount_all_turns_weigh_alike_and_with_0_only_the_own_counts() -> None:
    assert_close(influence_rewards(TWO, 0.0), TWO)
    assert_close(influence_rewards(TWO, 0), TWO)  # a whole number
    # (0.2 + 0.7 + 0.75) / 3, (0.9 + 0.7 + 0.75) / 3; (0.8 + 0.75) / 2, (0.6 + 0.75) / 2
    assert_close(influence_rewards(TWO, 1.0)[:2], [{"a": 0.55, "b": 2.35 / 3}, {"a": 0.775, "b": 0.675}])


def test_a_score_of_nothing_is_a_score() -> None:
    # (1 + 0.5 * 0) / 1.5 and, with one of two wrong before all are, (1 + 0.5 * 0) / 1.5, (0 + 0.5 * 0) / 1.5
    assert_close(influence_rewards([{"a": 1.0}, {"a": 0.0}], 0.5, "own"), [{"a": 2 / 3}, {"a": 0.0}])
    assert_close(influence_rewards([{"a": 1.0}, {"a": 0.0}], 0.5, "own", "last"), [{"a": 0.0}, {"a": 0.0}])
    fallen = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}]
    assert_close(influence_rewards(fallen, 0.5), [{"a": 2 / 3, "b": 0.0}, {"a": 0.0, "b": 0.0}])


def test_one_person_alone_shares_with_itself() -> None:
    alone = [{"a": turn["a"]} for turn in TWO]
    assert_close(influence_rewards(alone, 0.3, "team"), influence_rewards(alone, 0.3, "own"))
    assert incentives(alone, 1, 1, 1, 1) == ([{"a": 0.0}] * 3, 0)


def test_who_is_absent_from_a_turn_is_left_out_of_both_sums() -> None:
    table = [{"a": 0.2, "b": 0.9}, {"b": 0.6}, {"a": 1.0}]
    # team: (0.2 + 0.3 * 0.6 + 0.09 * 1) / 1.39; own of a: (0.2 + 0.09 * 1) / 1.09, of b: (0.9 + 0.3 * 0.6) / 1.3
    assert_close(influence_rewards(table, 0.3)[:1], [{"a": 0.47 / 1.39, "b": 1.17 / 1.39}])
    assert_close(influence_rewards(table, 0.3, "own")[:1], [{"a": 0.29 / 1.09, "b": 1.08 / 1.3}])
    assert_close(influence_rewards(table, 0.3, "own", "last"), [{"a": 1.0, "b": 0.6}, {"b": 0.6}, {"a": 1.0}])
    # A turn without answers has no mean.
    assert_close(influence_rewards([{"a": 0.2}, {}, {"b": 1.0}], 0.5)[:1], [{"a": 0.45 / 1.25}])
    assert_close(influence_rewards([{"a": 0.2}, {}], 0.5, "team", "last")[:1], [{"a": 0.2}])


# Incentives. Each amount is a power of ten, so that the digits of the reward name them.

AMOUNTS = {"alpha0": 1.0, "alpha1": 10.0, "beta0": 100.0, "beta1": 1000.0}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0, 0, 0), (1, 0, 0), 1.0),  # while the others were wrong, a corrects itself
        ((1, 0, 0), (0, 0, 0), -1.0),  # and the other way round
        ((0, 1, 1), (1, 1, 1), 10.0),  # the others were right: a is persuaded
        ((1, 1, 1), (0, 1, 1), -10.0),  # a was right with them and is wrong now
        ((0, 0, 0), (1, 1, 1), 1.0),  # the others' former side counts, not the present one
        ((1, 1, 1), (1, 0, 0), 0.0),
        ((0, 0, 0), (0, 1, 1), 0.0),
    ],
)
def test_the_own_change_is_paid_in_the_turn_of_the_change(first: Any, second: Any, expected: float) -> None:
    table = score_table([first, second], ["a", "b", "c"])
    pay, _ = incentives(table, AMOUNTS["alpha0"], AMOUNTS["alpha1"])
    assert pay[1]["a"] == expected
    assert pay[0] == ZERO


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (0.0, (0.0, 1.0), 100.0),  # a wrong answer that helped the others
        (0.0, (1.0, 0.0), -100.0),  # a wrong answer that misled them
        (1.0, (0.0, 1.0), 1000.0),  # a right answer that persuaded them
        (1.0, (1.0, 0.0), -1000.0),  # a right answer that drove them away
        (1.0, (1.0, 1.0), 0.0),
        (0.0, (0.0, 0.0), 0.0),
    ],
)
def test_the_change_of_the_others_is_paid_in_the_turn_before_it(own: float, others: Any, expected: float) -> None:
    table = score_table([[own, others[0], others[0]], [own, others[1], others[1]]], ["a", "b", "c"])
    pay, _ = incentives(table, **AMOUNTS)
    assert pay[0]["a"] == expected, "from the first turn on"
    assert pay[1]["a"] == 0.0


def test_all_that_one_answer_earns_is_added_up() -> None:
    # From turn 0 to 1 a corrects itself beside a wrong b; from 1 to 2 the right a persuades b.
    table = score_table([[0.1, 0.2], [0.9, 0.2], [0.9, 0.8]], ["a", "b"])
    pay, ties = incentives(table, **AMOUNTS)
    # Turn 0: the wrong b saw a change for the better (100). Turn 2: b was persuaded by a right a (10).
    assert pay == [{"a": 0.0, "b": 100.0}, {"a": 1.0 + 1000.0, "b": 0.0}, {"a": 0.0, "b": 10.0}]
    assert ties == 0


def test_others_that_are_neither_right_nor_wrong_pay_nothing_and_are_counted() -> None:
    table = score_table([[0.0, 0.7, 0.3], [1.0, 0.7, 0.3]], ["a", "b", "c"])
    pay, ties = incentives(table, **AMOUNTS)
    # For a: its change beside a tie, and the others' lasting tie. For b and c the others change from wrong: b sees
    # a and c go from 0.15 to 0.65; c sees a and b go from 0.35 to 0.85.
    assert pay == [{"a": 0.0, "b": 1000.0, "c": 100.0}, ZERO]
    assert ties == 2


def test_an_own_score_of_a_half_is_a_tie_too() -> None:
    table = score_table([[0.5, 1.0], [1.0, 1.0]], ["a", "b"])
    pay, ties = incentives(table, **AMOUNTS)
    assert pay == [{"a": 0.0, "b": 0.0}] * 2
    assert ties == 2, "the change of a, and what b did to a; b itself has not changed"


def test_only_who_answers_in_both_turns_can_change() -> None:
    table = [{"a": 0.0, "b": 0.0}, {"a": 1.0, "c": 1.0}]
    signs, ties = incentive_signs(table)
    # b's wrong answer is followed by a's change; c was not there before, and a alone can have been influenced.
    assert signs == [{"a": {}, "b": {"beta0": 1}}, {"a": {"alpha0": 1}, "c": {}}]
    assert ties == 0


def test_the_kinds_are_the_arguments() -> None:
    table = score_table([[0.1, 0.2], [0.9, 0.2], [0.9, 0.8]], ["a", "b"])
    signs, _ = incentive_signs(table)
    for kind in INCENTIVES:
        pay, _ = incentives(table, **{kind: 2.0})
        assert [{name: 2.0 * found.get(kind, 0) for name, found in turn.items()} for turn in signs] == pay


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -0.1}, r"gamma is -0\.1; it must be from 0 to 1"),
        ({"gamma": float("nan")}, "gamma is nan"),
        ({"gamma": 1.5}, r"gamma is 1\.5"),
        ({"gamma": 0.3, "reward": "some"}, "reward is 'some'; choose from team, own"),
        ({"gamma": 0.3, "horizon": "next"}, "horizon is 'next'; choose from discounted_sum, last, current"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        influence_rewards(TWO, **options)


@pytest.mark.parametrize("kind", INCENTIVES)
def test_amounts_must_be_finite(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{kind} is inf"):
        incentives(TWO, **{kind: float("inf")})


@pytest.mark.parametrize("read", [incentives, incentive_signs, lambda table: influence_rewards(table, 0.3)])
def test_bad_tables_are_refused(read: Any) -> None:
    with pytest.raises(ValueError, match="scores has 0 turns"):
        read([])
    for score in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scores: that of 'b' in turn 1 is {score}; it must be between 0 and 1"):
            read([{"a": 0.1}, {"a": 0.2, "b": score}])
