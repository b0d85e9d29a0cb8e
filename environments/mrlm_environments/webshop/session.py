"""A visit to the shop: the page, its text and its clickable parts. Pages read as in WebShop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_pl.environment.tasks import Shared
from mrlm_pl.environment.tools import ToolError, clip

BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("description", "features", "reviews")
SEPARATOR = " [SEP] "


@dataclass(frozen=True)
class Session(Shared):
    """A moment of a visit to the shop; a search and a click return the next one.

    Args:
        catalog: catalog of the shop.
        instruction: instruction that every page shows.
        page_size: number of products on a page of results.
        list_actions: True ends :meth:`text` with the available actions.
        page: ``search``, ``results``, ``item`` or one of :data:`SUB_PAGES`.
        results: numbers of the products that the search found.
        number: index of the page of results.
        product: open product; None if none is open.
        options: chosen values by name.
        bought: whether the product was bought.
    """

    catalog: Catalog
    instruction: str
    page_size: int
    list_actions: bool
    page: str = "search"
    results: tuple[str, ...] = ()
    number: int = 1
    product: Product | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    bought: bool = False

    def search(self, keywords: str) -> Session:
        """Return the session on the first page of results.

        Raises:
            ToolError: the page has no search bar, or the keywords are empty.
        """
        if self.page != "search":
            raise ToolError(f"this page has no search bar; click {BACK!r} first")
        if not keywords.strip():
            raise ToolError("the keywords are empty")
        return replace(self, page="results", results=self.catalog.search(keywords))

    def click(self, value: str) -> Session:
        """Return the session after a click on a button, a product or an option's value, in upper or lower case.

        Raises:
            ToolError: the page has no such text to click on.
        """
        targets = self.targets()
        if value.strip().lower() not in targets:
            known = f"click one of {list(targets)}" if targets else "search first"
            raise ToolError(f"there is no {clip(value, 60)!r} to click on; {known}")
        return targets[value.strip().lower()]

    def targets(self) -> dict[str, Session]:
        """Return the sessions after clicks by the texts to click on, in lower case and WebShop's order.

        A value of two options has the option's name before it, as in ``size: small``.
        """
        if self.page == "search":
            return {}
        targets = {BACK.lower(): Session(self.catalog, self.instruction, self.page_size, self.list_actions)}
        if self.page == "results":
            if self.number > 1:
                targets[PREVIOUS.lower()] = replace(self, number=self.number - 1)
            if self.number * self.page_size < len(self.results):
                targets[NEXT.lower()] = replace(self, number=self.number + 1)
            for asin in self.shown():
                targets[asin.lower()] = replace(self, page="item", product=self.catalog.products[asin])
            return targets
        assert self.product is not None
        if self.page != "item":
            return targets | {PREVIOUS.lower(): replace(self, page="item")}
        targets[PREVIOUS.lower()] = replace(self, page="results", product=None, options={})
        targets |= {page: replace(self, page=page) for page in SUB_PAGES} | {BUY.lower(): replace(self, bought=True)}
        values = [(name, value) for name, own in self.product.options.items() for value in dict.fromkeys(own)]
        label_counts = Counter([*targets, *(value.lower() for _, value in values)])
        for name, value in values:
            text = value.lower() if label_counts[value.lower()] == 1 else f"{name}: {value}".lower()
            targets[text] = replace(self, options={**self.options, name: value})
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
