"""WebShop's reward: a table computed by hand, and the cases of its formula one by one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from mrlm_environments.webshop.catalog import Product
from mrlm_environments.webshop.files import plain_nouns
from mrlm_environments.webshop.generated import CATEGORIES
from mrlm_environments.webshop.scoring import color, match, matches, token_set_ratio, type_factor

from tests.support.environments.data_sets import SAMPLES

SHOE = Product(
    asin="B000000001",
    title="Norwen Runner Shoe Gel Heel Gym Sole",
    query="running shoe",
    categories=("Clothing", "Shoes", "Running"),
    price=49.99,
    price_text="$49.99",
    attributes=("arch support", "quick drying"),
    options={"color": ("navy blue", "red"), "size": ("9", "10")},
    description="A machine washable shoe.",
    features=("With memory foam.",),
)
GOAL: dict[str, Any] = {"attributes": ["arch support", "memory foam"], "options": ["blue", "9"], "price_upper": 60.0}
BLUE_9 = {"color": "navy blue", "size": "9"}


def bought(options: dict[str, str], goal: dict[str, Any] | None = None, **changes: Any) -> float:
    product = dataclasses.replace(SHOE, **changes)
    return sum(match(product, options, SHOE, {**GOAL, **(goal or {})}, plain_nouns).components.values())


OTHER = {"query": "tent", "categories": ("Sports", "Tents")}


@pytest.mark.parametrize(
    ("options", "goal", "changes", "reward"),
    [
        # (2 attributes + 2 options + price) of 5
        (BLUE_9, {}, {}, 5 / 5),
        ({"color": "navy blue"}, {}, {}, 4 / 5),
        ({}, {}, {}, 3 / 5),
        ({"color": "red", "size": "9"}, {}, {}, 4 / 5),
        (BLUE_9, {}, {"price": 60.0}, 5 / 5),
        (BLUE_9, {}, {"price": 60.01}, 4 / 5),
        (BLUE_9, {}, {"attributes": ()}, 4 / 5),  # memory foam is among the features
        (BLUE_9, {}, {"attributes": (), "features": ()}, 3 / 5),
        (BLUE_9, {}, {"attributes": ("support of the arch", "foam memory"), "features": ()}, 5 / 5),
        (BLUE_9, {"attributes": ["machine washable", "gel heel"]}, {"attributes": ()}, 5 / 5),  # description, title
        (BLUE_9, {"attributes": ["tea tree"]}, {}, 3 / 4),
        (BLUE_9, {"options": []}, {}, 3 / 3),
        (BLUE_9, {"options": ["9", "blue", "one bag"]}, {}, 5 / 6),
        # types: the titles' seven nouns are norwen runner shoe gel heel gym sole
        (BLUE_9, {}, {"query": "tent", "title": "Sole"}, 5 / 5),  # 1/7 of the title, three shared categories
        (BLUE_9, {}, {"query": "tent", "categories": ("Clothing", "Running"), "title": "Sole"}, 5 / 5),
        (BLUE_9, {}, {**OTHER, "categories": ("Clothing", "Tents"), "title": "Sole"}, 0.5 * 5 / 5),
        (BLUE_9, {}, {**OTHER, "title": "Gym Sole Tent"}, 5 / 5),  # 2/7 > 0.2
        (BLUE_9, {}, {**OTHER, "title": "Gym Tent"}, 0.5 * 5 / 5),  # 1/7 < 0.2
        ({}, {}, {**OTHER, "title": "Gym Tent", "price": 99.0}, 0.5 * 2 / 5),
        (BLUE_9, {}, {"title": "Tent"}, 0.0),  # no noun: 0 in spite of the same query
    ],
)
def test_partial_matches_earn_what_the_formula_says(
    options: dict[str, str], goal: dict[str, Any], changes: dict[str, Any], reward: float
) -> None:
    assert bought(options, goal, **changes) == pytest.approx(reward, abs=1e-12)


def test_less_than_a_tenth_of_the_titles_nouns_is_a_tenth() -> None:
    title = " ".join(f"{letter}oun" for letter in "abcdefghijk")  # eleven
    target = dataclasses.replace(SHOE, title=title)
    assert type_factor(dataclasses.replace(SHOE, title="aoun"), target, plain_nouns) == 0.1
    assert type_factor(dataclasses.replace(SHOE, title="aoun boun"), target, plain_nouns) == 1.0
    assert type_factor(SHOE, dataclasses.replace(SHOE, title="7"), plain_nouns) == 1.0  # none: 0.2, the same query
    none = dataclasses.replace(SHOE, title="7", query="tent", categories=())
    assert type_factor(SHOE, none, plain_nouns) == 0.5


def test_the_reward_has_three_parts() -> None:
    found = match(SHOE, {"size": "9"}, SHOE, GOAL, plain_nouns)
    assert found.components == pytest.approx({"attributes": 2 / 5, "options": 1 / 5, "price": 1 / 5})
    assert not found.complete
    assert match(SHOE, BLUE_9, SHOE, GOAL, plain_nouns).complete


def test_ratios_are_those_of_thefuzz() -> None:
    """200 random pairs with the results of ``thefuzz.fuzz.token_set_ratio``, thefuzz 0.22.1."""
    lines = (SAMPLES / "token_set_ratio.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 200
    assert [token_set_ratio(row["first"], row["second"]) for row in rows] == [row["ratio"] for row in rows]


def test_texts_match_above_85() -> None:
    assert matches("machine memory free, foam navy Größe", "machine foam ounce memory")  # 86 by thefuzz
    assert not matches("Stainless-Steel free, ounce", "Stainless-Steel ounces crème large")  # 85


def test_colors_are_reduced_to_the_first_of_the_list() -> None:
    assert [color(value) for value in ("navy blue", "dark grey", "burgundy red", "xl")] == [
        "blue",
        "dark",
        "burgundy",
        "xl",
    ]


def test_more_chosen_options_than_the_goal_has_earn_no_more_than_one() -> None:
    """A later version of WebShop counts chosen options that match, and so earns more than 1."""
    assert bought({**BLUE_9, "shade": "sky blue", "pack": "9"}) == 1.0


@pytest.mark.parametrize("category", CATEGORIES, ids=lambda category: category["path"])
def test_no_two_values_of_the_generated_shop_match(category: Any) -> None:
    options = [value for own in category["options"].values() for value in own]
    pairs = [*itertools.combinations(category["attributes"], 2), *itertools.combinations(options, 2)]
    assert [pair for pair in pairs if matches(color(pair[0]), color(pair[1]))] == []
