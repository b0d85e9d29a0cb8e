"""WebShop's own files, here small invented ones of their form."""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import WebShopEnvironment
from mrlm_environments.webshop.files import plain_nouns, read_shop

from mrlm_pl.environment import SPLITS
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A product with the fields of WebShop's file that are read, and some of the others."""
    return {
        "asin": f"B{number:09d}",
        "name": f"Maker Tin Cup {chr(97 + number % 26)}up",
        "query": " Tin Cup ",
        "category": "home",
        "product_category": "Home & Kitchen › Dining › Cups",
        "full_description": "A cup.",
        "small_description": ["Light.", "Of tin."],
        "pricing": "$19.99$24.50",
        "customization_options": {
            "Color": [{"value": "Red/White", "image": "x.jpg"}, {"value": " Blue "}],
            "Size": None,
        },
        "images": ["x.jpg"],
        "brand": "Maker",
        **changes,
    }


def asked(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "instruction": f"i want tin cup number {number}.",
        "instruction_attributes": ["leak proof"],
        "instruction_options": ["blue"],
        "assignment_id": "x",
        **changes,
    }


def shop(folder: Path, rows: list[Any], goals: dict[str, Any] | None = None) -> dict[str, str]:
    asins = [item["asin"] for item in rows if "asin" in item]
    content = {
        "products": rows,
        "attributes": {asin: {"attributes": ["leak proof"], "instruction": None} for asin in asins},
        "goals": {asin: [asked(int(asin[1:] or 0))] for asin in asins if asin[1:].isdigit()}
        if goals is None
        else goals,
    }
    for name, value in content.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return {name: str(folder / f"{name}.json") for name in content}


def test_products_are_read_as_webshop_reads_them(tmp_path: Path) -> None:
    rows = [row(1), row(1), row(2, asin="nan"), row(3, asin="B00000000003"), row(4, pricing=None)]
    rows += [row(5, pricing="$1,049.50", customization_options="", small_description="One.", full_description=None)]
    environment = WebShopEnvironment(shop(tmp_path, rows))
    products = environment.catalog.products
    assert list(products) == ["B000000001", "B000000004", "B000000005"]
    first, second, third = products.values()
    assert (first.query, first.categories) == ("tin cup", ("Home & Kitchen", "Dining", "Cups"))
    assert first.options == {"color": ("red | white", "blue")}
    assert (first.attributes, first.features) == (("leak proof",), ("Light.", "Of tin."))
    assert first.price_text == "$19.99 to $24.5"
    assert 19.99 <= first.price <= 24.5
    assert (second.price, second.price_text) == (100.0, "$100.0")
    assert (third.price, third.options, third.features, third.description) == (1049.5, {}, ("One.",), "")


def test_prices_and_limits_depend_on_the_product_alone(tmp_path: Path) -> None:
    """WebShop draws them in the order of the file, before it sets the seed."""
    rows = [row(number) for number in range(30)]
    first = WebShopEnvironment(shop(tmp_path, rows)).catalog
    read_shop.cache_clear()
    again = WebShopEnvironment(shop(tmp_path, rows[::-1])).catalog
    assert again.products == first.products
    key = lambda goal: goal["asin"]  # noqa: E731
    assert sorted(again.goals, key=key) == sorted(first.goals, key=key)
    assert len({product.price for product in first.products.values()}) == 30
    for data in first.goals:
        price = first.products[data["asin"]].price
        assert price < data["price_upper"] <= (price // 10 + 4) * 10
        assert data["instruction"].endswith(f"and price lower than {data['price_upper']:.2f} dollars")


def test_goals_are_in_webshops_order_and_the_splits_are_disjoint(tmp_path: Path) -> None:
    rows = [row(number) for number in range(40)]
    environment = WebShopEnvironment(shop(tmp_path, rows))
    order = [item["asin"] for item in rows]
    random.Random(233).shuffle(order)
    posed = {split: [task.data["asin"] for task in environment.tasks(split)] for split in SPLITS}
    assert posed == {"test": order[:4], "validation": order[4:8], "train": order[8:]}


def test_every_goal_of_the_files_can_be_bought(tmp_path: Path) -> None:
    rows = [row(number, pricing="$990.00" if number == 3 else "$20.00") for number in range(30)]
    goals = {item["asin"]: [asked(number), asked(number + 100)] for number, item in enumerate(rows)}
    goals["B000000000"] = [asked(0, instruction_attributes=[]), asked(1, instruction_options={"color": "blue"})]
    environment = WebShopEnvironment(shop(tmp_path, rows, goals))
    assert len(environment.catalog.goals) == 59, "a goal without attributes is left out"
    dearest = next(goal for goal in environment.catalog.goals if goal["asin"] == "B000000003")
    assert dearest["price_upper"] == 1_000_000
    assert "price" not in dearest["instruction"]
    for split in SPLITS:
        for task in environment.tasks(split):
            gold = environment.gold(task)
            assert gold is not None
            environment.reset(task)
            for reply in gold["agent"]:
                step = environment.step({"agent": Message("assistant", reply)})
            assert step.rewards["agent"] == 1.0
    check_environment(environment).raise_on_failure()
    assert environment.copy().catalog is environment.catalog


def test_unreadable_products_are_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(1), {"asin": "B2"}, row(3, pricing="$a"), row(4)]
    files = shop(tmp_path, rows)
    assert len(WebShopEnvironment(files).catalog.products) == 2
    assert "skipped 2 products" in caplog.text
    assert "product 2: Object missing required field `name`" in caplog.text


def test_missing_and_strange_files_are_named(tmp_path: Path) -> None:
    files = shop(tmp_path, [row(1)])
    with pytest.raises(DataError, match=r"webshop: .*none.json cannot be read .*; give a path to WebShop's file"):
        WebShopEnvironment({**files, "goals": str(tmp_path / "none.json")})
    with pytest.raises(DataError, match=r"attributes.json is not of WebShop's form: Expected `array`, got `object`"):
        WebShopEnvironment({**files, "products": files["attributes"]})
    with pytest.raises(DataError, match=r"no goal of .* is for a product of .*; give files that belong together"):
        WebShopEnvironment(shop(tmp_path, [row(2)], {"B9": [asked(1)]}), products=1)


def test_nouns_are_words_or_those_of_a_spacy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain_nouns("Set of 2 Tin Cups for the Garden, 12 oz") == ["set", "tin", "cups", "garden", "oz"]
    files = shop(tmp_path, [row(1)])
    with pytest.raises(ConfigurationError, match=r"noun_model 'en_none' cannot be loaded .*; pip install spacy"):
        WebShopEnvironment(files, noun_model="en_none")

    def parse(title: str) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(text=word, pos_="NOUN" if word[0].isupper() else "ADJ") for word in title.split()]

    monkeypatch.setitem(sys.modules, "spacy", types.SimpleNamespace(load=lambda name: parse))
    read_shop.cache_clear()
    assert WebShopEnvironment(files, noun_model="en_some").catalog.nouns("A big Tin Cup") == ["a", "tin", "cup"]
    read_shop.cache_clear()
