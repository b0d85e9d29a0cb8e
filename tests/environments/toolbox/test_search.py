from __future__ import annotations

import copy
import json
import pickle
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import QuestionEnvironment, exact_match
from mrlm_environments.toolbox.search import (
    EMBEDDED_CORPUS,
    CorpusSearch,
    RetrievalServer,
    SearchBackend,
    SearchResult,
    WebSearch,
    _build_index,
)

from mrlm_pl.environment.rows import read_rows
from mrlm_pl.environment.tools import ToolError, written_call
from mrlm_pl.episode import Task
from mrlm_pl.errors import ConfigurationError, DataError, RemoteError
from mrlm_pl.policy.tiny import build_tokenizer
from tests.support.runs.recorded_episodes import recorded


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


def test_contents_are_a_title_and_a_text(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"id": "0", "contents": '"Mont Blanc"\nIt is the highest\nof the Alps.'},
        {"id": "1", "contents": "One line of granite"},
        {"id": "2", "title": "K2", "text": "A peak.", "contents": '"Other"\npeak'},
    ]
    search = CorpusSearch(corpus(tmp_path / "c.jsonl", rows))
    (found,) = search.search("alps", 3)
    assert found == SearchResult("Mont Blanc", "It is the highest\nof the Alps.")
    assert [found.title for found in search.search("granite", 3)] == ["One line of granite"]
    assert search.search("peak", 3) == [SearchResult("K2", "A peak.")]


def test_threads_that_search_first_wait_for_one_index(tmp_path: Path) -> None:
    rows = [{"title": str(number), "text": "stone " * 50} for number in range(2000)]
    search, built = CorpusSearch(corpus(tmp_path / "c.jsonl", rows)), _build_index.cache_info().misses
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: len(search.search("stone", 3)), range(4)))
    assert found == [3, 3, 3, 3]
    assert _build_index.cache_info().misses == built + 1


class StandIn:
    """A retrieval server with Search-R1's form that answers with these statuses, then with passages."""

    def __init__(self, statuses: Sequence[int] = (), body: object = None) -> None:
        self.asked: list[object] = []
        left, stand_in = list(statuses), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.asked.append(asked)
                found = [
                    [
                        {"document": {"id": "7", "contents": f'"Title {n}"\nAbout {query}.'}, "score": 1.0 - n}
                        for n in range(asked["topk"])
                    ]
                    for query in asked["queries"]
                ]
                self.send_response(left.pop(0) if left else 200)
                self.end_headers()
                self.wfile.write(json.dumps({"result": found} if body is None else body).encode())

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/retrieve"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def served() -> Iterator[Callable[..., StandIn]]:
    started: list[StandIn] = []

    def start(*options: Any) -> StandIn:
        started.append(StandIn(*options))
        return started[-1]

    yield start
    for stand_in in started:
        stand_in.server.shutdown()
        stand_in.server.server_close()


def test_a_retrieval_server_is_asked_as_search_r1_asks_it(served: Callable[..., StandIn]) -> None:
    stand_in = served()
    answer = asked("who é?", backend=RetrievalServer(stand_in.url), results=2)
    assert answer == "Results from the search engine:\n[1] Title 0\nAbout who é?.\n[2] Title 1\nAbout who é?."
    assert stand_in.asked == [{"queries": ["who é?"], "topk": 2, "return_scores": True}]


def test_an_overloaded_retrieval_server_is_asked_again(served: Callable[..., StandIn]) -> None:
    stand_in = served([503, 429])
    assert len(RetrievalServer(stand_in.url).search("x", 3)) == 3
    assert len(stand_in.asked) == 3


def test_the_agent_reads_why_a_query_was_rejected(served: Callable[..., StandIn]) -> None:
    stand_in = served([500], {"detail": "bad query"})
    with pytest.raises(ToolError, match=r"the search failed with status 500: .*bad query"):
        RetrievalServer(stand_in.url).search("x", 3)
    assert len(stand_in.asked) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"results": []},
        {"result": []},
        {"result": {"x": []}},
        {"result": [{}]},
        {"result": [[{"contents": "x"}]]},
        {"result": [[{"document": {"contents": None}}]]},
        [],
        "x",
    ],
)
def test_another_form_of_answers_fails_the_episode(served: Callable[..., StandIn], body: object) -> None:
    stand_in = served([], body)
    with pytest.raises(RemoteError, match=f"{stand_in.url}: its answer has another form"):
        RetrievalServer(stand_in.url).search("x", 3)


def test_an_answer_of_a_hundred_thousand_levels_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deep(*_: object) -> str:
        return "[" * 100_000

    monkeypatch.setattr(RetrievalServer, "_post", deep)
    with pytest.raises(RemoteError, match="its answer has another form"):
        RetrievalServer("http://127.0.0.1:1").search("x", 3)


def test_a_run_begins_only_if_the_retrieval_server_answers(served: Callable[..., StandIn]) -> None:
    stand_in = served()
    tools = [WebSearch(RetrievalServer(stand_in.url))]
    environment = QuestionEnvironment([{"prompt": "?"}] * 9, [lambda reply, row: 0], tools=tools)  # type: ignore[list-item]
    environment.tasks("train")
    copied = environment.copy()
    copied.reset(copied.tasks("train")[0])
    assert len(stand_in.asked) == 1, "copies do not ask again"
    stand_in.server.shutdown()
    stand_in.server.server_close()
    closed = QuestionEnvironment(
        [{"prompt": "?"}] * 9, [lambda reply, row: 0], tools=[WebSearch(RetrievalServer(stand_in.url, seconds=0.3))]
    )
    with pytest.raises(RemoteError, match=f"{stand_in.url}: no results within 0.3 s, at last .*see whether it runs"):
        closed.tasks("train")


def test_a_search_and_an_exact_match_are_rewarded_and_the_results_masked(
    served: Callable[..., StandIn],
) -> None:
    rows = [{"question": f"Who is {n}?", "golden_answers": [f"Number {n}", f"No. {n}"]} for n in range(9)]
    tools = [WebSearch(RetrievalServer(served().url))]
    environment = QuestionEnvironment(rows, [exact_match], prompt="{question}", tools=tools)  # type: ignore[list-item]
    replies = [written_call("web_search", query="who"), "<answer>the no 7</answer>"]

    def searches_then_answers(task: Task) -> dict[str, list[str]]:
        return {"agent": [replies[0], replies[1].replace("7", task.data["golden_answers"][1][-1])]}

    episode = recorded(environment, 2, gold=searches_then_answers)[1]
    (row,) = episode.trajectories["agent"]
    tokenizer = build_tokenizer()
    sampled = tokenizer.decode([t for t, own in zip(row.token_ids, row.action_mask, strict=True) if own])
    observed = tokenizer.decode([t for t, own in zip(row.token_ids, row.action_mask, strict=True) if not own])
    assert [turn.reward for turn in row.turns] == [0.0, 1.0]
    assert ("Title 2" in observed, "Title" in sampled) == (True, False)
    assert ("<answer>the no" in sampled, "<answer>" in observed) == (True, False)


def test_a_retrieval_server_in_a_configuration(served: Callable[..., StandIn], mrlm: Any, tmp_path: Path) -> None:
    rows = corpus(tmp_path / "r.jsonl", [{"question": f"{n}?", "golden_answers": [str(n)]} for n in range(40)])
    backend = {"class_path": "RetrievalServer", "init_args": {"url": served().url}}
    tools = [{"class_path": "WebSearch", "init_args": {"backend": backend}}]
    options = {"data": rows, "prompt": "{question}", "rewards": ["exact_match"], "tools": tools}
    words = [word for name, value in options.items() for word in (f"--environment.{name}", value)]
    status, out, err = mrlm("check-env", "question", *(w if isinstance(w, str) else json.dumps(w) for w in words))
    assert (status, "8 of 8" in out or "7 of 7" in out) == (0, True), out + err
    with pytest.raises(ConfigurationError, match="url is 'localhost:8000'"):
        RetrievalServer("localhost:8000")
