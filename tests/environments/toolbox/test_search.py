from __future__ import annotations

import copy
import json
import pickle
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from mrlm_environments.toolbox.search import (
    EMBEDDED_CORPUS,
    CorpusSearch,
    SearchBackend,
    SearchResult,
    WebSearch,
    _build_index,
)

from mrlm_pl.environment.rows import read_rows
from mrlm_pl.environment.tools import ToolError
from mrlm_pl.errors import ConfigurationError, DataError


def asked(query: str, **options: object) -> str:
    return WebSearch(**options).call({"query": query})  # type: ignore[arg-type]


def corpus(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_local_corpus_is_searched_and_named() -> None:
    answer = asked("How high is Mount Everest?")
    assert answer.startswith("Results from a local corpus of 62 documents (not the web):\n[1] Mount Everest\n")
    assert "8849" in answer
    assert answer.count("\n[") == 3
    assert asked("zzzz qqqq") == "No document of a local corpus of 62 documents (not the web) matches; try other words."


def test_every_fact_of_the_embedded_corpus_is_in_its_text_and_found_first() -> None:
    rows = read_rows(str(EMBEDDED_CORPUS), None, ("title", "text", "facts"))
    search = CorpusSearch()
    wants = [(row, fact) for row in rows for fact in row["facts"]]
    assert len(wants) > 80
    assert len({fact["what"] for _, fact in wants}) == len(wants)
    for row, fact in wants:
        assert str(fact["value"]) in row["text"], fact
        assert row["title"] in [found.title for found in search.search(fact["what"], 3)], fact


def test_ranking_by_bm25_with_stems(tmp_path: Path) -> None:
    path = corpus(
        tmp_path / "c.jsonl",
        [
            {
                "title": "Bread",
                "text": "Bread is baked from flour and water and much else besides.",
            },
            {"title": "Baking", "text": "Ovens bake."},
            {"title": "Rain", "text": "Water falls."},
        ],
    )
    found = CorpusSearch(path).search("baked bread flour", 5)
    assert [item.title for item in found] == ["Bread", "Baking"]
    assert len(CorpusSearch(path).search("water", 1)) == 1
    assert "a local corpus of 3 documents" in asked("water", corpus=path, results=1)


@pytest.mark.parametrize(
    "query", ['"', "* OR *", "title:everest", "a" * 100_000, "NEAR(", "\x00", "\ud800", "-", "x " * 5000, "'; DROP"]
)
def test_no_query_breaks_the_index(query: str) -> None:
    tool = WebSearch()
    assert tool.call({"query": query}).startswith(("Results", "No document"))
    assert "8849" in tool.call({"query": "Everest height"})


def test_an_empty_query_is_refused() -> None:
    with pytest.raises(ToolError, match="empty"):
        asked("  ")


def test_copies_share_the_index_and_other_processes_build_their_own() -> None:
    tool = WebSearch()
    expected = tool.call({"query": "gold"})
    built = _build_index.cache_info().misses
    assert copy.deepcopy(tool).call({"query": "gold"}) == expected
    assert _build_index.cache_info().misses == built
    pickled = pickle.dumps(tool)
    _build_index.cache_clear()  # another process has no index yet
    assert pickle.loads(pickled).call({"query": "gold"}) == expected
    assert _build_index.cache_info().misses == 1


class Fixed(SearchBackend):
    label = "the test engine"

    def search(self, query: str, k: int) -> Sequence[SearchResult]:
        return [SearchResult(query, "x" * 600, f"https://example.org/{number}") for number in range(9)]


def test_another_back_end() -> None:
    answer = asked("anything", backend=Fixed(), results=2, max_characters=10)
    assert answer.startswith(
        "Results from the test engine:\n[1] anything (https://example.org/0)\nxxxxxxxxxx\n[590 more"
    )
    assert "[2]" in answer
    assert "[3]" not in answer


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        WebSearch(corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigurationError, match="results is 0"):
        WebSearch(results=0)
    path = corpus(tmp_path / "c.jsonl", [{"title": "T", "text": "words"}, {"title": "T", "text": 3}])
    with pytest.raises(ConfigurationError, match="both"):
        WebSearch(backend=Fixed(), corpus=path)
    with pytest.raises(DataError, match="row 2"):
        WebSearch(corpus=path).call({"query": "x"})


def test_a_python_that_cannot_search_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[sqlite3.Connection] = []

    class Without(sqlite3.Connection):
        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            made.append(self)
            return super().execute(statement.replace("fts5", "no_fts5"), *values)  # type: ignore[arg-type]

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *names, **options: connect(*names, factory=Without, **options))
    path = corpus(tmp_path / "c.jsonl", [{"title": "a", "text": "b"}])
    with pytest.raises(ConfigurationError, match=r"SQLite cannot search text \(no such module: .*\); use a Python"):
        asked("b", backend=CorpusSearch(path))
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made[0].commit()
