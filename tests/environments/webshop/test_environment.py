"""The pages and tools of the shop, its generated goals, and the defects of WebShop's own server."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from mrlm_environments import WebShopEnvironment
from mrlm_environments.webshop.catalog import MAX_WORDS, Catalog, Product
from mrlm_environments.webshop.files import plain_nouns
from mrlm_environments.webshop.generated import generated_catalog
from mrlm_environments.webshop.session import Session

from mrlm_pl.environment import SPLITS, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tools import ToolError, written_call
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError


def product(number: int, **changes: Any) -> Product:
    fields = {
        "asin": f"B{number:09d}",
        "title": f"Cup {number}",
        "query": "cup",
        "categories": ("Home", "Cups"),
        "price": 9.5,
        "price_text": "$9.5",
        "attributes": (),
    }
    return Product(**{**fields, **changes})


CUP = product(
    7,
    title="Blue Tin Cup",
    options={"color": ("blue", "red"), "size": ("small", "large")},
    description="A cup of tin.",
    features=("Light.", "Strong."),
    reviews=(("Good", "5", "I like it."),),
)


def visit(*products: Product, page_size: int = 10) -> Session:
    return Session(Catalog(products, plain_nouns), "buy a cup", page_size, list_actions=False)


def search(keywords: str) -> str:
    return written_call("search_action", keywords=keywords)


def click(value: str) -> str:
    return written_call("click_action", value=value)


def played(replies: Sequence[str | Message], task: Task | None = None, **options: Any) -> list[Step]:
    environment = WebShopEnvironment(**options)
    environment.reset(task or environment.tasks("train")[0])
    messages = [reply if isinstance(reply, Message) else Message("assistant", reply) for reply in replies]
    return [environment.step({"agent": message}) for message in messages]


# Pages


def test_pages_read_as_in_webshop() -> None:
    """The texts of the example in AgentBench's prompt for WebShop, with another product."""
    session = visit(CUP)
    assert session.text() == "WebShop [SEP] Instruction: [SEP] buy a cup [SEP] Search"
    session = session.search("tin cup")
    top = "Instruction: [SEP] buy a cup [SEP] Back to Search [SEP] "
    assert session.text() == f"{top}Page 1 (Total results: 1) [SEP] B000000007 [SEP] Blue Tin Cup [SEP] $9.5"
    session = session.click("B000000007")
    item = (
        f"{top}< Prev [SEP] color [SEP] blue [SEP] red [SEP] size [SEP] small [SEP] large [SEP] Blue Tin Cup [SEP] "
        "Price: $9.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert session.text() == item
    for name, shown in (
        ("Description", "A cup of tin."),
        ("Features", "Light. [SEP] Strong."),
        ("Reviews", '"Good" [SEP] 5 [SEP] I like it.'),
    ):
        session = session.click(name)
        assert session.text() == f"{top}< Prev [SEP] {shown}"
        session = session.click("< Prev")
        assert session.text() == item


def test_results_have_pages_and_keep_their_place() -> None:
    session = visit(*(product(number) for number in range(25)))
    session = session.search("cup")
    assert [list(session.targets())[:2], len(session.shown())] == [["back to search", "next >"], 10]
    session = session.click("Next >")
    session = session.click("next >")
    assert len(session.shown()) == 5
    assert list(session.targets())[:2] == ["back to search", "< prev"]
    assert "Page 3 (Total results: 25) [SEP] < Prev [SEP] B000000020" in session.text()
    session = session.click("B000000021")
    session = session.click("< Prev")
    assert session.shown()[0] == "B000000020"
    session = session.click("Back to Search")
    assert session.page == "search"


def test_actions_are_listed_in_webshops_order() -> None:
    session = visit(CUP)
    assert session.actions() == {"has_search_bar": True, "clickables": []}
    session = session.search("cup")
    session = session.click("b000000007")
    actions = session.actions()
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert actions == {"has_search_bar": False, "clickables": [*buttons, "blue", "red", "small", "large"]}


def test_options_are_forgotten_on_the_way_back_and_kept_on_the_pages_of_the_product() -> None:
    session = visit(CUP)
    session = session.search("cup")
    session = session.click(CUP.asin)
    session = session.click("blue")
    session = session.click("Features")
    session = session.click("< Prev")
    assert session.options == {"color": "blue"}
    session = session.click("< Prev")
    session = session.click(CUP.asin)
    assert session.options == {}


# Defects of WebShop's server


def test_a_chosen_option_is_shown() -> None:
    """There the page is the same before and after."""
    session = visit(CUP)
    session = session.search("cup")
    session = session.click(CUP.asin)
    before = session.text()
    session = session.click("blue")
    session = session.click("red")
    session = session.click("small")
    assert session.text() == f"{before}\nChosen: color: red, size: small"


def test_a_value_of_two_options_can_be_chosen_for_each() -> None:
    """There the last option with the value takes every click."""
    session = visit(product(1, options={"top": ("red", "reviews"), "base": ("red", "tan")}))
    session = session.search("cup")
    session = session.click("B000000001")
    for text in ("top: red", "base: red"):
        session = session.click(text)
    assert session.options == {"top": "red", "base": "red"}
    session = session.click("top: reviews")
    assert (session.page, session.options["top"]) == ("item", "reviews")
    assert list(session.targets())[-4:] == ["top: red", "top: reviews", "base: red", "tan"]


def test_the_search_button_is_not_listed_and_a_search_needs_the_search_bar() -> None:
    """There the button is listed and does nothing, and a search works on pages without a search bar."""
    session = visit(CUP)
    with pytest.raises(ToolError, match=r"there is no 'Search' to click on; search first"):
        session.click("Search")
    session = session.search("cup")
    with pytest.raises(ToolError, match=r"no search bar; click 'Back to Search' first"):
        session.search("cup")


def test_keywords_with_a_meaning_there_are_words_here() -> None:
    """There ``<r>`` draws 50 products from the global random numbers."""
    catalog = generated_catalog(300)
    assert catalog.search("<r>") == ()
    assert catalog.search("<c> mug") == catalog.search("c mug")


def test_a_number_in_lower_case_can_be_clicked() -> None:
    """There a product's number is raised to upper case and not found."""
    session = visit(product(1, asin="b00000abc1"))
    session = session.search("cup")
    session = session.click("b00000abc1")
    assert session.page == "item"


def test_every_call_is_answered_and_malformed_ones_name_the_fault() -> None:
    """There the calls after the first are dropped, and a malformed one is answered by a message without a page."""
    calls = (ToolCall("x", "search_action", {"keywords": "navy"}), ToolCall("y", "click_action", {"value": "Next >"}))
    (step,) = played([Message("assistant", "", tool_calls=calls)])
    assert [message.tool_call_id for message in step.observations["agent"]] == ["x", "y"]
    assert "Page 2" in step.observations["agent"][1].content
    steps = played(["hm", "<tool_call>{oops</tool_call>", written_call("click_action", valu="x"), click("Buy Now")])
    told = [step.observations["agent"][0].content for step in steps]
    assert told[0].startswith("Call a tool: <tool_call>")
    assert told[1].startswith("Error: malformed call: it is not JSON.")
    assert told[2] == "Error: wrong arguments of click_action: 'value' is a required property"
    assert told[3] == "Error: there is no 'Buy Now' to click on; search first"


# Search


def test_scores_are_bm25_with_the_parameters_of_pyserini() -> None:
    """Two documents of 2 and 4 words; the one with the rare word in fewer words is first."""
    catalog = Catalog([product(1, title="tin cup plate bowl"), product(2, title="tin mug")], plain_nouns)
    assert catalog.search("tin") == ("B000000002", "B000000001")
    assert catalog.search("cups") == ("B000000001",)  # stems
    assert catalog.search("the of") == ()
    scores = catalog._index.get_scores(["tin"])
    # Lucene: ln(1 + (N - n + 0.5) / (n + 0.5)) tf / (tf + k1 (1 - b + b length / mean)), N = n = 2, mean length 3
    idf = 0.1823215567939546  # ln(1.2)
    expected = [idf / (1 + 0.9 * (0.6 + 0.4 * length / 3)) for length in (4, 2)]
    assert scores.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_query_with_a_possessive_is_searched_for_its_other_words() -> None:
    shop = Catalog([product(1, title="tin cup"), product(2, title="steel mug")], plain_nouns)
    assert shop.search("men's mug") == ("B000000002",)
    assert shop.search("s") == ()
    assert Catalog([product(1, title="mug, size S")], plain_nouns).search("s") == ("B000000001",)


def test_a_search_finds_fifty_at_most_and_reads_options_and_the_first_feature() -> None:
    catalog = generated_catalog(300)
    assert len(catalog.search("black white color size")) == 50
    own = next(iter(catalog.products.values()))
    assert own.asin in catalog.search(f"{own.title} {own.features[0]}")[:3]
    session = visit(CUP)
    session = session.search("light red")
    assert session.shown() == (CUP.asin,)
    session = session.click("Back to Search")
    session = session.search("strong")  # the second feature
    assert session.shown() == ()


def test_only_the_first_words_of_a_query_are_stemmed(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Catalog([CUP], plain_nouns)
    stemmed: list[str] = []

    def stem(word: str) -> str:
        stemmed.append(word)
        return word

    monkeypatch.setattr("mrlm_environments.webshop.catalog._stem", stem)
    shop.search("the " + " ".join(f"w{number}" for number in range(10_000)))
    assert stemmed == [f"w{number}" for number in range(MAX_WORDS)]


# Goals and rewards


@pytest.mark.long
def test_the_expert_buys_what_500_of_500_goals_ask_for() -> None:
    environment = WebShopEnvironment()
    rewards, splits = [], []
    for split in SPLITS:
        source = environment.tasks(split)
        asked = [source[index] for index in range({"train": 300}.get(split, 100))]
        splits.append({task.data["asin"] for task in asked})
        for task in asked:
            gold = environment.gold(task)
            assert gold is not None
            environment.reset(task)
            steps = [environment.step({"agent": Message("assistant", reply)}) for reply in gold["agent"]]
            rewards.append((steps[-1].rewards["agent"], steps[-1].success, steps[-1].stop_reason))
    assert rewards == [(1.0, True, "bought")] * 500
    assert not splits[0] & splits[1] | splits[0] & splits[2] | splits[1] & splits[2], "no product in two splits"


def test_goals_do_not_depend_on_the_global_random_numbers() -> None:
    """There prices and limits are drawn before the seed is set, so that goals differ between processes."""
    generated_catalog.cache_clear()
    first = WebShopEnvironment(products=60)
    tasks = [first.tasks("train")[index].data for index in range(5)]
    generated_catalog.cache_clear()
    second = WebShopEnvironment(products=60)
    assert [second.tasks("train")[index].data for index in range(5)] == tasks
    assert first.catalog.products == second.catalog.products
    larger = generated_catalog(90).products
    assert all(larger[asin] == own for asin, own in first.catalog.products.items()), "for any other products"
    assert tasks[0]["instruction"].endswith(f", and price lower than {tasks[0]['price_upper']:.2f} dollars")


def test_the_limit_is_above_the_price_and_within_four_steps() -> None:
    environment = WebShopEnvironment()
    for index in range(50):
        data = environment.tasks("train")[index].data
        price = environment.catalog.products[data["asin"]].price
        assert price < data["price_upper"] <= (price // 10 + 4) * 10
        assert data["price_upper"] > (price // 10 + 1) * 10, "the larger of two"


def test_without_a_purchase_nothing_is_earned_and_a_penalty_can_be_set() -> None:
    steps = played([search("mug"), "hm"], max_turns=2)
    assert (steps[-1].done, steps[-1].truncated, steps[-1].stop_reason) == (True, True, "max_turns")
    assert (steps[-1].rewards, steps[-1].success) == ({"agent": 0.0}, False)
    assert played(["hm"], max_turns=1, incomplete_penalty=0.2)[0].components == {"agent": {"incomplete": -0.2}}


def test_a_purchase_without_options_earns_a_part() -> None:
    environment = WebShopEnvironment()
    task = next(task for task in environment.tasks("train") if len(task.data["options"]) == 2)
    gold = environment.gold(task)
    assert gold is not None
    replies = [reply for reply in gold["agent"] if not any(value in reply for value in task.data["options"])]
    assert len(replies) == len(gold["agent"]) - 2
    wanted = len(task.data["attributes"]) + 3
    (*_, last) = played(replies, task)
    assert last.rewards["agent"] == pytest.approx((wanted - 2) / wanted)
    assert last.success is False


def test_the_contract_holds_for_one_agent_and_for_the_team() -> None:
    check_environment(WebShopEnvironment()).raise_on_failure()
    check_environment(WebShopEnvironment(team=True)).raise_on_failure()


def test_an_episode_can_be_forked() -> None:
    environment = WebShopEnvironment()
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None
    environment.reset(task)
    for reply in gold["agent"][:2]:
        environment.step({"agent": Message("assistant", reply)})
    branch = environment.copy()
    environment.step({"agent": Message("assistant", click("Back to Search"))})
    for reply in gold["agent"][2:]:
        step = branch.step({"agent": Message("assistant", reply)})
    assert step.rewards == {"agent": 1.0}
    assert branch.catalog is environment.catalog


def test_forks_on_a_page_of_a_product_share_it() -> None:
    environment = WebShopEnvironment()
    task = environment.tasks("train")[0]
    number = next(iter(environment.catalog.products))
    environment.reset(task)
    environment.step({"agent": Message("assistant", search(environment.catalog.products[number].title))})
    environment.step({"agent": Message("assistant", click(number))})
    branch = environment.copy()
    assert branch._session.product is environment._session.product is environment.catalog.products[number]


@pytest.mark.long
def test_a_thousand_sessions_take_little_memory() -> None:
    environment = WebShopEnvironment()
    task = environment.tasks("train")[0]
    tracemalloc.start()
    try:
        sessions = [environment.copy() for _ in range(1000)]
        for session in sessions:
            session.reset(task)
            session.step({"agent": Message("assistant", search("mug"))})
        held = tracemalloc.get_traced_memory()[0] / len(sessions)
    finally:
        tracemalloc.stop()
    assert held < 10_000, f"{held:.0f} bytes a session"


# The team


def test_searcher_and_buyer_act_on_their_pages_and_earn_the_same() -> None:
    environment = WebShopEnvironment(team=True)
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None
    assert [tool.name for tool in environment.tools("searcher")] == ["search_action", "click_action"]
    assert [tool.name for tool in environment.tools("buyer")] == ["click_action"]
    assert list(environment.reset(task)) == ["searcher"]
    found, opened = gold["searcher"]
    environment.step({"searcher": Message("assistant", found)})
    step = environment.step({"searcher": Message("assistant", opened + click("Buy Now"))})
    first, page = step.observations["buyer"]
    assert (first.role, page.role) == ("system", "user")
    assert page.content.startswith("Instruction:")
    step = environment.step({"buyer": Message("assistant", click("< Prev"))})
    own = step.observations["searcher"]
    assert [message.content for message in own[:2]] == ["The buyer acts now.", "Error: this page is the buyer's"]
    assert "Page 1" in own[2].content
    environment.step({"searcher": Message("assistant", opened)})
    for reply in gold["buyer"]:
        step = environment.step({"buyer": Message("assistant", reply)})
    assert step.rewards == {"searcher": 1.0, "buyer": 1.0}


def test_an_agent_of_the_team_that_did_not_act_is_not_penalized() -> None:
    environment = WebShopEnvironment(team=True, max_turns=1, incomplete_penalty=0.5)
    environment.reset(environment.tasks("train")[0])
    task = environment.tasks("train")[0]
    assert environment.step({"searcher": Message("assistant", "hm")}).rewards == {"searcher": -0.5}
    assert environment.bounds(task) == (-0.5, 2.0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(ConfigurationError, match=r"rapidfuzz is not installed; pip install 'mrlm\[webshop\]'"):
        Catalog([CUP], plain_nouns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0; it must be 1 or above"),
        ({"products": 3}, "products is 3; it must be from 30 to 10000"),
        ({"incomplete_penalty": -1}, "incomplete_penalty is -1; it must be from 0 to 1"),
        ({"noun_model": "en"}, "noun_model is for WebShop's files"),
        ({"data": {"products": "x"}}, "data names products; give the paths of products, attributes, goals"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(webshop|WebShopEnvironment): {message}"):
        WebShopEnvironment(**options)
