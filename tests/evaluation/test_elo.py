"""Ratings against arithmetic."""

from __future__ import annotations

import math

import pytest

from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from mrlm_pl.evaluation.elo import GameTable, elo_ratings, game_score


def table(*rows: tuple[str, str, float, int]) -> GameTable:
    games = GameTable()
    for row in rows:
        games.add(*row)
    return games


def test_two_players() -> None:
    rating = elo_ratings(table(("b", "a", 75, 100)), zero="a", virtual_draws=0)["b"]
    assert rating.elo == pytest.approx(400 * math.log10(3))
    # The information of 100 games with p = 3/4 is 100 * 3/16 = 18.75 on the logistic scale.
    half = 1.959963984540054 / math.sqrt(18.75) * 400 / math.log(10)
    assert (rating.low, rating.high) == (pytest.approx(rating.elo - half), pytest.approx(rating.elo + half))


def test_virtual_draws_keep_a_perfect_score_finite() -> None:
    rating = elo_ratings(table(("b", "a", 10, 10)), zero="a")["b"]
    assert rating.elo == pytest.approx(400 * math.log10(10.5 / 0.5))


def test_a_chain_adds_up_and_its_variances_too() -> None:
    ratings = elo_ratings(table(("b", "a", 60, 80), ("b", "c", 10, 40)), zero="a", virtual_draws=0)
    assert ratings["b"].elo == pytest.approx(400 * math.log10(3))
    assert ratings["c"].elo == pytest.approx(2 * 400 * math.log10(3))
    variance = 1 / (80 * 3 / 16) + 1 / (40 * 3 / 16)
    half = 1.959963984540054 * math.sqrt(variance) * 400 / math.log(10)
    assert ratings["c"].high - ratings["c"].elo == pytest.approx(half)
    assert ratings["a"].low == ratings["a"].high == 0


def test_expected_scores_give_back_the_strengths() -> None:
    elo = {"a": 0.0, "b": 120.0, "c": -310.0, "d": 455.0}
    rows = [(one, two, 50 / (1 + 10 ** ((elo[two] - elo[one]) / 400)), 50) for one in elo for two in elo if one < two]
    found = elo_ratings(table(*rows), zero="a", virtual_draws=0)
    assert {name: item.elo for name, item in found.items()} == pytest.approx(elo, abs=1e-6)


def test_results_add_up_from_both_sides() -> None:
    games = table(("a", "b", 1.5, 4), ("b", "a", 3, 6))
    assert games == {("a", "b"): (4.5, 10)}


def test_without_games_the_first_player_has_rating_zero() -> None:
    assert elo_ratings(GameTable(), zero="a")["a"].elo == 0


def test_players_without_a_chain_of_games_to_the_first_one_have_no_rating() -> None:
    """Theirs could be any number. The others keep the rating that they have without them."""
    linked = [("b", "a", 75.0, 100)]
    ratings = elo_ratings(table(*linked, ("d", "c", 3, 8)), zero="a", virtual_draws=0)
    assert sorted(ratings) == ["a", "b"]
    assert ratings["b"].elo == pytest.approx(400 * math.log10(3))
    assert sorted(elo_ratings(table(("d", "c", 3, 8)), zero="a")) == ["a"]


def test_a_long_chain_of_perfect_scores() -> None:
    """The search does not end early: each link adds 400 log10(100.5 / 0.5) points."""
    ratings = elo_ratings(table(*((f"{n + 1:03}", f"{n:03}", 100, 100) for n in range(200))), zero="000")
    assert ratings["200"].elo == pytest.approx(200 * 400 * math.log10(100.5 / 0.5), abs=1e-3)


def test_the_search_does_not_overshoot() -> None:
    """Full steps of Newton's method leave these games. At the highest likelihood, expected scores equal scores."""
    rows = [("b", "a", 1, 1), ("d", "a", 1000, 1000), ("c", "b", 10_000, 10_000), ("d", "c", 10_000, 10_000)]
    ratings = elo_ratings(table(*rows), zero="a")
    missing = dict.fromkeys("abcd", 0.0)
    for player, other, won, count in rows:
        chance = 1 / (1 + 10 ** ((ratings[other].elo - ratings[player].elo) / 400))
        difference = won + 0.5 - (count + 1) * chance  # with a drawn game of each pair
        missing[player], missing[other] = missing[player] + difference, missing[other] - difference
    assert list(missing.values()) == pytest.approx([0.0] * 4, abs=1e-6)


def episode(near: float | None, far: float | None) -> Episode:
    rows = {}
    for agent, reward in (("near", near), ("far", far)):
        if reward is not None:
            turns = (Turn(agent, 0, 0, 1, reward, {}, "stop", agent, 0, "test"),)
            rows[agent] = (Trajectory(agent, agent, (1,), (True,), (0.0,), turns),)
    return Episode("0", Task("duel", "train", 0, 0, {}), "g", 0, 0, rows, "end")


@pytest.mark.parametrize(
    ("near", "far", "score"),
    [(1, -1, 1.0), (-1, 1, 0.0), (0, 0, 0.5), (2, 1, 1.0), (None, -1, 1.0), (-1, None, 0.0)],
)
def test_the_side_that_earned_more_has_won(near: float | None, far: float | None, score: float) -> None:
    assert game_score(episode(near, far), ["near"], ["far"]) == score
