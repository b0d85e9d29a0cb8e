"""A generated catalog, and goals for it."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_pl.seeding import keyed_random

LIMITS = tuple(10.0 * step for step in range(1, 100))
NO_LIMIT = 1_000_000.0
MAX_PRODUCTS = 10_000

WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
CATEGORIES: Sequence[Mapping[str, Any]] = WORDS["categories"]
"""Words of each category: names of its products, parts, uses, attributes, and the values of two options."""

_REQUESTS = ("i need", "i am looking for", "find me", "i want to buy", "show me", "can you get me")
_ASIN = string.digits + string.ascii_uppercase
_WORD = re.compile("[a-z]+")
_NAMES = [name for own in CATEGORIES for name in (*own["names"], *own["parts"], *own["uses"])]
_NOUNS = frozenset(_WORD.findall(" ".join([*WORDS["brands"], *_NAMES]).lower()))


@functools.lru_cache(maxsize=4)
def generated_catalog(size: int) -> Catalog:
    """Return a catalog of ``size`` products, the same one every time; a larger one begins with a smaller one."""
    return Catalog(map(_product, range(size)), nouns)


def nouns(title: str) -> list[str]:
    """Return the nouns of a generated title.

    >>> nouns("Norwen Tea Cup with Cork Base for Office Desk, Leak Proof")
    ['norwen', 'tea', 'cup', 'cork', 'base', 'office', 'desk']
    """
    return [word for word in _WORD.findall(title.lower()) if word in _NOUNS]


def generated_goal(rng: Random, catalog: Catalog) -> dict[str, Any]:
    """Return data of a task: an instruction, the product it was made of, attributes, options and the price's limit."""
    product = rng.choice(tuple(catalog.products.values()))
    attributes = rng.sample(product.attributes, rng.randint(1, 2))
    options = {name: rng.choice(values) for name, values in product.options.items() if rng.random() < 0.75}
    chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
    wanted = f"{rng.choice(_REQUESTS)} {', '.join(attributes)} {product.query}{' with ' * bool(chosen)}{chosen}"
    return goal_data(product, wanted, attributes, list(options.values()), rng)


def goal_data(
    product: Product, instruction: str, attributes: list[str], options: list[str], rng: Random
) -> dict[str, Any]:
    """Return data of a task, with WebShop's limit: the larger of two draws from the four steps above the price.

    A product above 970 dollars has no limit.
    """
    steps = [step for step in LIMITS if step > product.price][:4]
    limit = max(rng.sample(steps, 2)) if len(steps) >= 2 else NO_LIMIT
    text = f", and price lower than {limit:.2f} dollars" if len(steps) >= 2 else ""
    return {
        "instruction": instruction + text,
        "asin": product.asin,
        "attributes": attributes,
        "options": options,
        "price_upper": limit,
    }


def _product(number: int) -> Product:
    rng = keyed_random("webshop product", number)
    category = CATEGORIES[number % len(CATEGORIES)]
    name, part, use = (rng.choice(category[words]) for words in ("names", "parts", "uses"))
    brand, attributes = rng.choice(WORDS["brands"]), rng.sample(category["attributes"], 4)
    price = round(rng.randint(5, 180) + 0.99, 2)
    options = {
        option: tuple(value for value in values if rng.random() < 0.75) or (values[0],)
        for option, values in category["options"].items()
    }
    stars = rng.randint(2, 5)
    return Product(
        asin=f"B0{''.join(rng.choices(_ASIN, k=4))}{number:04d}",
        title=f"{brand} {name} with {part} for {use}, {attributes[0]}".title(),
        query=name,
        categories=tuple(part.strip() for part in f"{category['path']} › {name}".split("›")),
        price=price,
        price_text=f"${price}",
        attributes=tuple(attributes),
        options=options,
        description=f"This {name} by {brand} is {attributes[1]}. Made for {use}, it comes with {part}.",
        features=tuple(f"{attribute.capitalize()}." for attribute in attributes),
        rating=str(stars),
        reviews=((f"My {use}", str(stars), f"The {part} is {'good' if stars > 3 else 'poor'}."),),
    )
