"""Every measured number of the site is in a file of results that its page names, or has its source here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import results_page
from benchmarks.tables.results import RESULTS, read
from tests.support.documents import ROOT

DOCS = ROOT / "docs"
GENERATED = {
    *(path.relative_to(DOCS).as_posix() for path in results_page.pages()),
    "results/conformance.md",
    "environments/checks.md",
    "environments/catalog.md",
    "changelog.md",
}
"""Pages that other tests compare with the files that they are written from."""

PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PAGES = {name: path for name, path in PAGES.items() if name not in GENERATED} | {"README.md": ROOT / "README.md"}

NOT_MEASURED = {
    "algorithms/tree_grpo.md": ".93 1.10",  # fractions of a gradient, by arithmetic
    "scaling/async.md": ".05 .02",  # settings of the benchmark
    "coming_from/comlrl.md": ".95 .01",  # defaults
    "coming_from/marti.md": ".01",  # a default
    "coming_from/openrlhf.md": ".01 .95 .999",  # defaults
    "coming_from/verl.md": ".95 .01",  # defaults
    "training/cross_policy.md": ".25",  # the default
    "scaling/engines.md": "5.23 .17 .32 .33",  # versions
    "environments/README.md": ".93",  # the largest reward
    "environments/debate.md": ".01 .25 .15",  # weights of the score
    "environments/games.md": ".05 2.35",  # rewards
    "environments/sql.md": ".01 3.44",  # the tolerance, a version
    "environments/webshop.md": ".15",  # millions of weights
    "environments/writing.md": ".05 .03 .23 2.98",  # CoMLRL's rewards
    "README.md": ".17 2.98 3.13",  # millions of weights; the largest reward; a version
    "results/papers.md": ".17 11.04 7.71 6.49 7.54 82.80 14.05 12.20 7.32 2.77",  # weights; the papers' own
    "environments/sandbox.md": "23.10",  # a version
    "tutorials/distilling_a_team.md": ".54 .77 .93 .94",  # what its cells print
    "training/verifier.md": ".693 .05",  # ln 2; a threshold
}
"""Numbers that are settings, versions, arithmetic or a paper's, by page."""

HIDDEN = (
    re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),
    re.compile(r"^    .*$", re.MULTILINE),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"\b\d{4}\.\d{5}\b"),  # papers
    re.compile(
        r"\b(TRL|verl|CoMLRL|verifiers|OpenRLHF|Linux|Ubuntu|Python|Phi|Qwen|GLM|Llama) \d+(\.\d+)+"
    ),  # versions
)
NUMBER = re.compile(r"(?<![\w./])\d*\.\d{2,3}(?!\w|\.\d)|(?<![\w./])\d*\.\d(?= (?:s|ms|kB|MB|GB|MiB|%)\b)")
"""A number with two decimals or with a unit: settings rarely look like it."""


def shown(text: str) -> set[str]:
    """Return the numbers in the running text and the tables of a page.

    >>> sorted(shown("`0.25` of [1.12](a.md#1.13) takes 3.5 s, -.061 ± .025 with TRL 1.16 and a share of .5"))
    ['.025', '.061', '1.12', '3.5']
    """
    for hidden in HIDDEN:
        text = hidden.sub(" ", text)
    return {number.lstrip("0") for number in NUMBER.findall(text)}


def values(found: Any, lists: bool) -> Iterator[float]:
    """Yield the numbers of a file of results, also those of its lists or not."""
    if isinstance(found, dict):
        for item in found.values():
            yield from values(item, lists)
    elif isinstance(found, list):
        for item in found if lists else ():
            yield from values(item, lists)
    elif isinstance(found, int | float):
        yield abs(found)


def known(name: str) -> list[float]:
    """Return the numbers of a file of results, of its lists those that the results page shows."""
    found = read(name)
    shows = [sections[name].tables(found) for sections in results_page.CHAPTERS.values() if name in sections]
    tabled = [float(number) for text in shows for number in re.findall(r"\d*\.?\d+", text)]
    return tabled + [value * unit for value in values(found, not shows) for unit in (1, 100, 1e-3, 1e-6)]


def files_of(page: str, text: str) -> set[str]:
    """Return the files of results whose section, name or script a page names; the index of papers shows all."""
    names = {path.stem for path in RESULTS.glob("*.json")} - {"earlier"}
    if page == "results/papers.md":
        return names
    linked = set()
    for title, sections in results_page.CHAPTERS.items():
        anchors = {section.anchor: name for name, section in sections.items()}
        links = re.findall(rf"results/{results_page.PAGES[title]}\.md#([\w-]+)", text)
        linked |= {anchors[anchor] for anchor in links}
    return linked | (names & set(re.findall(r"(\w+)\.(?:json|py)\b", text)))


def unexplained(page: str, text: str) -> set[str]:
    """Return the numbers of a page that neither the files that it names nor the settings hold."""
    there = [value for name in files_of(page, text) for value in known(name)]
    numbers = shown(text) - set(NOT_MEASURED.get(page, "").split())
    close = {text: 0.5001 * 10.0 ** -len(text.partition(".")[2]) for text in numbers}
    return {text for text in numbers if not any(abs(float(text) - value) <= close[text] for value in there)}


def earlier() -> dict[str, set[str]]:
    """Return the numbers by page that were measured before their results were kept in files."""
    found: dict[str, set[str]] = {}
    for row in read("earlier")["measurements"]:
        for page in row["pages"]:
            found.setdefault(page, set()).update(number.lstrip("0") for number in row["numbers"])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_have_a_source(page: str) -> None:
    missing = unexplained(page, PAGES[page].read_text()) - earlier().get(page, set())
    assert missing == set(), f"name the file of results on {page}, or the source of these numbers in this test"


def test_a_number_without_a_source_is_found() -> None:
    name, page = "environments/alfworld.md", PAGES["environments/alfworld.md"].read_text()
    assert unexplained(name, page + "\nThe success rises to .777.\n") == {".777"}
    assert ".236" in unexplained(name, page.replace("results/learning.md", "other.md").replace(".py", ""))


def test_sources_name_numbers_that_the_pages_have() -> None:
    texts = {name: shown(path.read_text()) for name, path in PAGES.items()}
    listed = [(page, set(numbers.split())) for page, numbers in NOT_MEASURED.items()]
    assert [(page, numbers - texts[page]) for page, numbers in listed if numbers - texts[page]] == []
    old = {page: numbers - texts[page] for page, numbers in earlier().items()}
    rows = read("earlier")["measurements"]
    shared = {number for row in rows if len(row["pages"]) > 1 for number in row["numbers"]}  # on one of their pages
    assert {page: numbers - shared for page, numbers in old.items() if numbers - shared} == {}
    assert json.dumps(rows).count("python benchmarks/") > 5
