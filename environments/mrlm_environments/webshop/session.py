"""A visit to the shop: the page, its text and its clickable parts. Pages read as in WebShop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_pl.environment.tools import ToolError, clipped

BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("description", "features", "reviews")
SEPARATOR = " [SEP] "
Target = tuple[str, ...]
"""The effect of a click: a kind and its arguments."""


class Session:
    """A visit to the shop.

    Args:
        catalog: of the shop.
        instruction: that every page shows.
        page_size: products of a page of results.
        list_actions: True ends :meth:`text` with the available actions.

    Attributes:
        product: that is open; None before one is.
    """

    def __init__(self, catalog: Catalog, instruction: str, page_size: int, list_actions: bool) -> None:
        self.catalog, self.instruction = catalog, instruction
        self.page_size, self.list_actions = page_size, list_actions
        self._leave()

    def _leave(self) -> None:
        self.page = "search"  # or results, item or one of SUB_PAGES
        self.results: tuple[str, ...] = ()
        self.number = 1
        self.product: Product | None = None
        self.options: dict[str, str] = {}
        self.bought = False

    def search(self, keywords: str) -> None:
        """Show the first page of results.

        Raises:
            ToolError: the page has no search bar, or the keywords are empty.
        """
        if self.page != "search":
            raise ToolError(f"this page has no search bar; click {BACK!r} first")
        if not keywords.strip():
            raise ToolError("the keywords are empty")
        self.results, self.page = self.catalog.search(keywords), "results"

    def click(self, value: str) -> None:
        """Click on a button, a product or an option's value, in upper or lower case.

        Raises:
            ToolError: the page has no such text to click on.
        """
        targets = self.targets()
        target = targets.get(value.strip().lower())
        if target is None:
            known = f"click one of {list(targets)}" if targets else "search first"
            raise ToolError(f"there is no {clipped(value, 60)!r} to click on; {known}")
        kind, *arguments = target
        if kind == "back":
            self._leave()
        elif kind == "turn":
            self.number += int(arguments[0])
        elif kind == "results":
            self.page, self.product, self.options = "results", None, {}
        elif kind == "item":
            self.page, self.product = "item", self.catalog.products[arguments[0]]
        elif kind == "sub":
            self.page = arguments[0]
        elif kind == "option":
            self.options[arguments[0]] = arguments[1]
        else:
            self.bought = True

    def targets(self) -> dict[str, Target]:
        """Return the effects of clicks by their texts in lower case, in WebShop's order.

        A value of two options has the option's name before it, as in ``size: small``.
        """
        if self.page == "search":
            return {}
        targets: dict[str, Target] = {BACK.lower(): ("back",)}
        if self.page == "results":
            if self.number > 1:
                targets[PREVIOUS.lower()] = ("turn", "-1")
            if self.number * self.page_size < len(self.results):
                targets[NEXT.lower()] = ("turn", "1")
            return targets | {asin.lower(): ("item", asin) for asin in self.shown()}
        assert self.product is not None
        if self.page != "item":
            return targets | {PREVIOUS.lower(): ("item", self.product.asin)}
        targets[PREVIOUS.lower()] = ("results",)
        targets |= {page: ("sub", page) for page in SUB_PAGES} | {BUY.lower(): ("buy",)}
        values = [(name, value) for name, own in self.product.options.items() for value in dict.fromkeys(own)]
        taken = Counter([*targets, *(value.lower() for _, value in values)])
        for name, value in values:
            text = value.lower() if taken[value.lower()] == 1 else f"{name}: {value}".lower()
            targets[text] = ("option", name, value)
        return targets

    def shown(self) -> tuple[str, ...]:
        """Return the numbers of the products on the page of results."""
        return self.results[(self.number - 1) * self.page_size : self.number * self.page_size]

    def actions(self) -> Mapping[str, Any]:
        """Return the available actions in WebShop's form."""
        return {"has_search_bar": self.page == "search", "clickables": list(self.targets())}

    def text(self) -> str:
        """Return the text of the page, the chosen options and the available actions."""
        lines = [SEPARATOR.join(self._parts())]
        if self.options:
            lines.append("Chosen: " + ", ".join(f"{name}: {value}" for name, value in self.options.items()))
        if self.list_actions:
            lines += ["", f"Available Actions:\n{self.actions()}"]
        return "\n".join(lines)

    def _parts(self) -> list[str]:
        top = ["Instruction:", self.instruction]
        if self.page == "search":
            return ["WebShop", *top, "Search"]
        top.append(BACK)
        if self.page == "results":
            buttons = [text for text in (PREVIOUS, NEXT) if text.lower() in self.targets()]
            found = [self.catalog.products[asin] for asin in self.shown()]
            listed = [part for product in found for part in (product.asin, product.title, product.price_text)]
            return [*top, f"Page {self.number} (Total results: {len(self.results)})", *buttons, *listed]
        product = self.product
        assert product is not None
        top.append(PREVIOUS)
        if self.page == "description":
            return [*top, product.description]
        if self.page == "features":
            return [*top, *(product.features or ["No Features"])]
        if self.page == "reviews":
            told = [part for title, stars, body in product.reviews for part in (f'"{title}"', stars, body)]
            return [*top, *(told or ["No reviews found"])]
        options = [part for name, values in product.options.items() for part in (name, *values)]
        sold = [product.title, f"Price: {product.price_text}", f"Rating: {product.rating}"]
        return [*top, *options, *sold, *(page.capitalize() for page in SUB_PAGES), BUY]
