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
        values = [NEXT] * (found.index(target.asin) // page_size) + [target.asin]
        session = Session(catalog, "", page_size, list_actions=False)
        inputs: list[tuple[str, str]] = [(session.page, keywords)]
        session.search(keywords)
        for value in values:
            inputs.append((session.page, value))
            session.click(value)
        texts = {action: text for text, action in session.targets().items()}
        inputs += [(session.page, texts["option", name, value]) for name, value in options.items()]
        inputs.append((session.page, BUY))
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
