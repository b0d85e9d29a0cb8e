"""A scripted expert: a search and the clicks that fulfill a goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_environments.webshop.scoring import color, match, token_set_ratio
from mrlm_environments.webshop.session import BUY, NEXT, Session


def gold_purchase(catalog: Catalog, goal: Mapping[str, Any], page_size: int, limit: int) -> list[tuple[str, str]]:
    """Return the pages and the inputs of a purchase that earns 1: keywords on the search page, then values to click on.

    The expert searches for words of the instruction, and for the title where these do not find the product.

    Args:
        catalog: of the shop.
        goal: data of a task.
        page_size: products of a page of results.
        limit: inputs that it may take; empty where more are needed, or the reward cannot be 1.
    """
    target = catalog.products[goal["asin"]]
    options = dict(_wanted_options(target, goal["options"]))
    if not match(target, options, target, goal, catalog.nouns).complete:
        return []
    for keywords in (" ".join([*goal["attributes"], target.query]), target.title):
        found = catalog.search(keywords)
        if target.asin not in found:
            continue
        session = Session(catalog, "", page_size, list_actions=False, page="item", product=target)
        texts = {tuple(after.options.items()): text for text, after in session.targets().items()}
        clicks = {
            "results": [NEXT] * (found.index(target.asin) // page_size) + [target.asin],
            "item": [*(texts[chosen,] for chosen in options.items()), BUY],
        }
        inputs = [("search", keywords), *((page, text) for page, own in clicks.items() for text in own)]
        if len(inputs) <= limit:
            return inputs
    return []


def _wanted_options(product: Product, wanted: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the value to choose of each option that the goal asks for, the most similar one."""
    free = dict(product.options)
    for text in wanted:
        values = [(name, value) for name, own in free.items() for value in own]
        if values:
            name, value = max(values, key=lambda item: (item[1] == text, token_set_ratio(color(item[1]), color(text))))
            del free[name]
            yield name, value
