"""Shapley values by their axioms and by published games."""

import itertools
import math
from random import Random

import pytest

from mrlm_pl.advantages import sampled_shapley_values, shapley_values


def gloves(members: frozenset[str]) -> float:
    """One left glove, two right ones; a pair is worth 1."""
    return float("left" in members and len(members) > 1)


def test_the_glove_game() -> None:
    """The textbook answer: 4/6, 1/6, 1/6."""
    assert shapley_values(["left", "right", "spare"], gloves) == pytest.approx(
        {"left": 4 / 6, "right": 1 / 6, "spare": 1 / 6}
    )


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_values_are_the_mean_gain_over_all_orders(count: int) -> None:
    agents = "abcdef"[:count]
    random = Random(count)
    worth = {
        frozenset(members): random.gauss(0, 1)
        for size in range(count + 1)
        for members in itertools.combinations(agents, size)
    }
    gains = dict.fromkeys(agents, 0.0)
    for order in itertools.permutations(agents):
        for place, agent in enumerate(order):
            gains[agent] += worth[frozenset(order[: place + 1])] - worth[frozenset(order[:place])]
    expected = {agent: gain / math.factorial(count) for agent, gain in gains.items()}
    found = shapley_values(list(agents), worth.__getitem__)
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(worth[frozenset(agents)] - worth[frozenset()])


def test_samples_are_unbiased_and_ask_once() -> None:
    asked: list[frozenset[str]] = []

    def value(members: frozenset[str]) -> float:
        asked.append(members)
        return gloves(members)

    agents = ["left", "right", "spare"]
    found = sampled_shapley_values(agents, value, 4000, Random(1))
    assert found == pytest.approx({"left": 4 / 6, "right": 1 / 6, "spare": 1 / 6}, abs=0.03)
    assert sum(found.values()) == pytest.approx(1.0)
    assert len(asked) == len(set(asked)) <= 8
