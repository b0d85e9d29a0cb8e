"""Purchases in a shop: WebShop, with a generated catalog or its own files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mrlm_environments.data_tasks import ending
from mrlm_environments.webshop.catalog import Catalog, Product
from mrlm_environments.webshop.files import read_shop, split_goals
from mrlm_environments.webshop.generated import MAX_PRODUCTS, generated_catalog, generated_goal
from mrlm_environments.webshop.scoring import color, match, token_set_ratio
from mrlm_environments.webshop.session import BUY, NEXT, Session
from mrlm_pl.environment import (
    DatasetTasks,
    Environment,
    Message,
    Observations,
    SeededTasks,
    Step,
    Task,
    TaskSource,
    ToolSchema,
)
from mrlm_pl.environment.tools import ToolCall, ToolError, answer_calls, requested_calls, tool_schema, written_call
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import PositiveInt, UnitInterval, between

SEARCH = tool_schema("search_action", "Search the shop, on a page with a search bar.", {"keywords": {"type": "string"}})
CLICK = tool_schema(
    "click_action", "Click a button, a product or an option of the page.", {"value": {"type": "string"}}
)
INSTRUCTION = (
    "You are shopping. Search for products, open one, choose its options and click Buy Now for the one that fits the "
    "instruction best. Every page is followed by the available actions."
)
HOW_TO_CALL = (
    'Call a tool: <tool_call>{"name": "search_action", "arguments": {"keywords": "..."}}</tool_call> or '
    '<tool_call>{"name": "click_action", "arguments": {"value": "..."}}</tool_call>.'
)
AGENT, SEARCHER, BUYER = "agent", "searcher", "buyer"
FILES = ("products", "attributes", "goals")


class WebShopEnvironment(Environment):
    """A shopping instruction, a shop with pages of text, and two tools: ``search_action`` and ``click_action``.

    Buying ends the episode with WebShop's reward: (matched attributes + matched options + price within the limit) /
    (attributes + options + 1), times a factor for the type of the product. Without a purchase it is 0.

    As a team, a searcher acts on the search page and the pages of results, a buyer on the pages of a product; both earn
    the reward.

    Args:
        data: WebShop's files, which replace the generated shop: ``{products: PATH, attributes: PATH, goals: PATH}``.
        products: size of the generated catalog, 300 by default, or the first products of the file, all by default.
        team: two agents, ``searcher`` and ``buyer``, instead of one.
        max_turns: replies of all agents together.
        incomplete_penalty: subtracted from the reward where nothing is bought; AgentRL's is 0.2.
        page_size: products of a page of results.
        list_actions: True ends every page with the list of available actions.
        instruction: system message before the first page.
        noun_model: spaCy's model that finds the nouns of titles in WebShop's files, such as ``en_core_web_lg``; None
            takes all words but function words.

    Raises:
        ConfigurationError: a value is out of its range, or the extra ``webshop`` is not installed.
        DataError: a file is missing or of another form.
    """

    name = "webshop"
    forks = True
    client_settings = ("team", "max_turns", "incomplete_penalty", "list_actions", "instruction")

    def __init__(
        self,
        data: dict[str, str] | None = None,
        products: PositiveInt | None = None,
        team: bool = False,
        max_turns: PositiveInt = 20,
        incomplete_penalty: UnitInterval = 0.0,
        page_size: PositiveInt = 10,
        list_actions: bool = True,
        instruction: str = INSTRUCTION,
        noun_model: str | None = None,
    ) -> None:
        self.agents = (SEARCHER, BUYER) if team else (AGENT,)
        self.max_turns, self.incomplete_penalty = max_turns, incomplete_penalty
        self.page_size, self.list_actions, self.instruction = page_size, list_actions, instruction
        self.catalog = _catalog(data, products, noun_model)

    def tasks(self, split: str) -> TaskSource:
        """Return generated goals without end, or those of the file; see :meth:`Environment.tasks`.

        The products of generated goals differ between splits. Among a file's goals, in WebShop's order, the first 500
        are the split ``test``, the next 500 ``validation``, a tenth each of fewer than 5,000.

        Raises:
            ConfigurationError: the split is unknown or empty.
        """
        if not self.catalog.goals:
            return SeededTasks(
                self.name, split, lambda rng: generated_goal(rng, self.catalog), lambda data: str(data["asin"])
            )
        return DatasetTasks(self.name, split, split_goals(self.catalog.goals, split))

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the tools that an agent may call."""
        return (CLICK,) if agent == BUYER else (SEARCH, CLICK)

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the search, the clicks and the purchase that earn 1; None where they do not fit in the turns."""
        inputs = gold_purchase(self.catalog, task.data, self.page_size, self.max_turns)
        replies: dict[str, list[str]] = {agent: [] for agent in self.agents}
        for page, text in inputs:
            tool, argument = (SEARCH, "keywords") if page == "search" else (CLICK, "value")
            replies[self._acting(page)].append(written_call(tool.name, **{argument: text}))
        return replies if inputs else None

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the returns without a purchase and of the right one; see :meth:`Environment.bounds`."""
        return -self.incomplete_penalty, float(len(self.agents))  # of a team, the searcher alone has acted

    def reset(self, task: Task) -> Observations:
        """Open the search page; see :meth:`Environment.reset`."""
        self._task, self._turns, self._faults, self._acted = task, 0, 0, frozenset[str]()
        self._session = Session(self.catalog, task.data["instruction"], self.page_size, self.list_actions)
        self._held: dict[str, list[Message]] = defaultdict(list)  # that the agent sees when it acts
        if self.instruction:
            self._held |= {agent: [Message("system", self.instruction)] for agent in self.agents}
        self._held[self.agents[0]].append(Message("user", self._session.text()))
        return {self.agents[0]: self._held.pop(self.agents[0])}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Answer the calls of a reply in order; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        self._turns += 1
        self._acted |= {agent}
        calls = requested_calls(message)
        for answer, made in answer_calls(calls, self.tools(agent), HOW_TO_CALL, partial(self._page_after, agent)):
            self._faults += not made
            self._held[agent].append(answer)
            if self._session.bought:
                return self._end("bought")
        if not calls:
            self._faults += 1
            self._held[agent].append(Message("user", HOW_TO_CALL))
        if self._turns == self.max_turns:
            return self._end("max_turns")
        acting = self._acting(self._session.page)
        if acting != agent:
            self._held[acting].append(Message("user", self._session.text()))
        return Step({acting: self._held.pop(acting)})

    def _acting(self, page: str) -> str:
        """Return the agent that acts on a page."""
        return self.agents[0 if page in ("search", "results") else -1]

    def _page_after(self, agent: str, call: ToolCall) -> str:
        """Search or click, and return the page."""
        acting = self._acting(self._session.page)
        if acting != agent:
            raise ToolError(f"this page is the {acting}'s")
        if call.name == SEARCH.name:
            self._session = self._session.search(call.arguments["keywords"])
        else:
            self._session = self._session.click(call.arguments["value"])
        acting = self._acting(self._session.page)
        return self._session.text() if acting == agent else f"The {acting} acts now."

    def _end(self, reason: str) -> Step:
        session = self._session
        metrics = {"failed_calls": float(self._faults)}
        components, success = {"incomplete": -self.incomplete_penalty}, False
        if session.product is not None and session.bought:
            target = self.catalog.products[self._task.data["asin"]]
            score = match(session.product, session.options, target, self._task.data, self.catalog.nouns)
            components, success = score.components, score.complete
            metrics["type"] = score.type
        earning = [agent for agent in self.agents if agent in self._acted]
        return ending(earning, components, reason, success, metrics)


def _catalog(data: Mapping[str, str] | None, size: int | None, noun_model: str | None) -> Catalog:
    """Return the generated catalog, or that of the files with its goals."""
    if data is not None:
        if set(data) != set(FILES):
            raise ConfigurationError(
                f"webshop: data names {', '.join(data) or 'nothing'}; give the paths of {', '.join(FILES)}"
            )
        return read_shop(*(data[name] for name in FILES), size, noun_model)
    if noun_model is not None:
        raise ConfigurationError("webshop: noun_model is for WebShop's files; give `data` or leave it out")
    between(30, MAX_PRODUCTS).check("webshop: ", products=size)
    return generated_catalog(size or 300)


def gold_purchase(catalog: Catalog, goal: Mapping[str, Any], page_size: int, limit: int) -> list[tuple[str, str]]:
    """Return the pages and the inputs of a purchase that earns 1: keywords on the search page, then values to click on.

    The expert searches for words of the instruction, and for the title where these do not find the product.

    Args:
        catalog: catalog of the shop.
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
