"""WebShop's reward of a purchase: matched attributes, options and price, times the match of the type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlm_environments.webshop.catalog import Product
from mrlm_environments.webshop.generated import WORDS

MATCH = 85
"""Texts whose ratio is above this match."""

COLORS = tuple(WORDS["colors"].split())
"""Names that options are reduced to, in WebShop's order."""

_LATIN_1 = dict.fromkeys(range(128, 256))
"""Characters that thefuzz removes."""


@dataclass(frozen=True)
class Match:
    """The parts of a goal that a purchase fulfills.

    Args:
        found: numbers of ``attributes`` and ``options`` that match, and 1 for a ``price`` within the limit.
        wanted: maximum of their sum.
        type: factor for the type of the product, 0 to 1.
    """

    found: Mapping[str, int]
    wanted: int
    type: float

    @property
    def complete(self) -> bool:
        """True if the reward is 1."""
        return self.type == 1 and sum(self.found.values()) == self.wanted

    @property
    def components(self) -> dict[str, float]:
        """Parts of the reward, which sum to (attributes + options + price) / wanted times the type."""
        return {name: self.type * count / self.wanted for name, count in self.found.items()}


def match(
    product: Product,
    options: Mapping[str, str],
    target: Product,
    goal: Mapping[str, Any],
    nouns: Callable[[str], Sequence[str]],
) -> Match:
    """Compare a purchase with a goal.

    Args:
        product: product that was bought.
        options: chosen values by name.
        target: product that the goal was made of.
        goal: goal with its ``attributes``, ``options`` and ``price_upper``.
        nouns: returns the nouns of a title.
    """
    chosen = [color(value) for value in options.values()]
    found = {
        "attributes": sum(has_attribute(product, attribute) for attribute in goal["attributes"]),
        "options": sum(any(matches(value, color(wanted)) for value in chosen) for wanted in goal["options"]),
        "price": int(product.price <= goal["price_upper"]),
    }
    return Match(found, len(goal["attributes"]) + len(goal["options"]) + 1, type_factor(product, target, nouns))


def type_factor(product: Product, target: Product, nouns: Callable[[str], Sequence[str]]) -> float:
    """Return 1 for the same type of product: the same query, two categories or a fifth of the title's nouns.

    Else 0.5. It is 0.1 where less than a tenth of the target's nouns is in the title, and 0 where none is.
    """
    wanted = nouns(target.title)
    title = len(set(wanted) & set(nouns(product.title))) / len(wanted) if wanted else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    shared = set(product.categories) & set(target.categories)
    return 1.0 if product.query == target.query or len(shared) >= 2 or title > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Return whether a product has an attribute, or its texts hold it."""
    texts = (product.title, " ".join(product.features), product.description)
    return any(matches(own, attribute) for own in product.attributes) or any(
        attribute in text.lower() for text in texts
    )


def color(value: str) -> str:
    """Return the first color that an option's value holds, else the value.

    >>> color("navy blue"), color("11 oz")
    ('blue', '11 oz')
    """
    return next((name for name in COLORS if name in value), value)


def matches(first: str, second: str) -> bool:
    """Return whether two texts are nearly the same."""
    return token_set_ratio(first, second) > MATCH


def token_set_ratio(first: str, second: str) -> int:
    """Return the similarity of the sets of words of two texts, 0 to 100, as ``thefuzz.fuzz.token_set_ratio`` does.

    >>> token_set_ratio("easy to clean", "Clean, easy!"), token_set_ratio("red", "blue")
    (100, 29)
    """
    # Imported here: an extra.
    from rapidfuzz import fuzz
    from rapidfuzz.utils import default_process

    score = fuzz.token_set_ratio(first.translate(_LATIN_1), second.translate(_LATIN_1), processor=default_process)
    return round(score)
