"""N-Triples files and SPARQL endpoints against the graph in memory."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.knowledge_graph.environment import KnowledgeGraphEnvironment
from mrlm_environments.knowledge_graph.exploration import Exploration, Graph, read_action
from mrlm_environments.knowledge_graph.graph import TripleStore
from mrlm_environments.knowledge_graph.questions import KINDS
from mrlm_environments.knowledge_graph.sparql import SparqlGraph, query_endpoint, query_file
from mrlm_environments.knowledge_graph.world import world

from mrlm_pl.environment.check import check_data
from mrlm_pl.environment.tools import written_call
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError, RemoteError
from tests.support.environments.graph_rows import NAMESPACE, TYPES, small_graph, written
from tests.support.servers.ports import free_port

pytest.importorskip("pyoxigraph", reason="the extra `graph` is not installed")

ROWS = [
    {
        "question": "Which films did both make?",
        "entities": {"Acme": "m.s1", "Best": "m.s2"},
        "answer": [{"answer_argument": "m.f3"}],
        "actions": [
            "get_neighbors(m.s1,film.studio.films)",
            "get_neighbors(m.s2,film.studio.films)",
            "intersection(#0,#1)",
        ],
    },
    {
        "question": "How many actors?",
        "entities": {"Acme": "m.s1"},
        "answer": [{"answer_argument": "2"}],
        "actions": ["get_neighbors(m.s1,film.studio.films)", "get_neighbors(#0,film.film.cast)", "count(#1)"],
    },
    {
        "question": "Which is the newest?",
        "entities": {"Acme": "m.s1"},
        "answer": [{"answer_argument": "m.f2"}],
        "actions": ["get_neighbors(m.s1,film.studio.films)", "argmax(#0,film.film.released)"],
    },
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(small_graph(), tmp_path / "graph.nt", TYPES)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "std.json"
    path.write_text(json.dumps(ROWS))
    return {"train": str(path)}


def test_a_file_plays_the_rows(file: str, rows: dict[str, str]) -> None:
    environment = KnowledgeGraphEnvironment(data=rows, graph=file)
    assert check_data(environment, "train").solved == (1, 2, 3)
    environment.reset(environment.tasks("train")[2])
    shown = []
    for action in (
        "get_relations(Acme)",
        "get_neighbors(Acme, film.studio.films)",
        "get_attributes(#0)",
        "get_relations(m.x)",
    ):
        step = environment.step({"agent": Message("assistant", f"Action: {action}")})
        shown.append(step.observations["agent"][0].content)
    assert shown[:3] == [
        "Observation: [film.studio.films]",
        "Observation: variable #0, which are instances of film.film",
        "Observation: [film.film.length, film.film.released]",
    ]
    assert shown[3].startswith("Error: 'm.x' is no entity")


def test_copies_share_the_graph_and_go_their_own_way(file: str, rows: dict[str, str]) -> None:
    environment = KnowledgeGraphEnvironment(data=rows, graph=file)
    environment.reset(environment.tasks("train")[1])
    films, cast, both = ("get_neighbors(Acme, film.studio.films)", "get_neighbors(#0, film.film.cast)", "count(#1)")
    environment.step({"agent": Message("assistant", f"Action: {films}")})
    forked = environment.copy()
    for action in (cast, both):
        forked.step({"agent": Message("assistant", f"Action: {action}")})
    assert forked.step({"agent": Message("assistant", "Final Answer: #2")}).rewards["agent"] == 1.0
    assert environment.step({"agent": Message("assistant", "Final Answer: #2")}).stop_reason == "invalid_variable"


def test_pyoxigraph_agrees_with_the_graph_in_memory(tmp_path: Path) -> None:
    @functools.cache
    def graphs(number: int) -> tuple[Graph, Graph]:
        home = world("train", number, 120)
        types = {relation.name: relation.target for relation in home.schema.relations}
        path = written(home.graph, tmp_path / f"{number}.nt", types)
        return home.graph, SparqlGraph(query_file(path), NAMESPACE, None)

    source = KnowledgeGraphEnvironment(entities=120).tasks("train")
    posed = [source[index].data for index in range(24)]
    assert len({data["kind"] for data in posed}) >= len(KINDS) - 1
    for data in posed:
        explored = [Exploration(graph, data["entities"]) for graph in graphs(data["world"]["number"])]
        for action in data["actions"]:
            read = read_action(action)
            assert read is not None
            assert explored[0].call(*read) == explored[1].call(*read)
        for number in range(len(explored[0].variables)):
            assert explored[0].answer(number) == explored[1].answer(number)


STRANGE = ["[Acme]", "50%", "%zz", "\ud800", "\uffff", "m.s1> ?x ?y", "a b", "#"]
STRANGE_IRIS = ["://", "http://[", "http://a:b/", "http://a:80\u0663", "http://a/#b#c"]


@pytest.mark.parametrize("name", [*STRANGE, *STRANGE_IRIS], ids=ascii)
def test_a_name_that_makes_no_iri_is_no_entity(file: str, rows: dict[str, str], name: str) -> None:
    environment = KnowledgeGraphEnvironment(data=rows, graph=file)
    environment.reset(environment.tasks("train")[0])
    step = environment.step({"agent": Message("assistant", written_call("get_relations", variable=name))})
    assert step.observations["agent"][0].content.startswith(f"Error: {name!a} is no entity")


@pytest.mark.parametrize(
    "name", ["http://a.example:80/b?c#d", "https://\u00e9.example/(a),_b", "%C3%A9_(city)", "m.s1"]
)
def test_a_name_that_makes_an_iri_is_looked_up(tmp_path: Path, name: str) -> None:
    iri = name if name.startswith("http") else f"{NAMESPACE}{name}"
    path = tmp_path / "graph.nt"
    path.write_text(f"<{iri}> <{NAMESPACE}a.b.c> <{NAMESPACE}m.x> .\n", encoding="utf-8")
    exploration = Exploration(SparqlGraph(query_file(str(path)), NAMESPACE, None), {})
    assert exploration.call("get_relations", {"variable": name}) == "Observation: [a.b.c]"


def test_the_work_of_a_query_grows_with_its_hops_not_with_its_paths(tmp_path: Path) -> None:
    graph = TripleStore({})
    for studio, film in itertools.product(range(20), repeat=2):
        graph.add(f"m.s{studio}", "film.studio.films", f"m.f{film}", "film.film.studio")
    explored = SparqlGraph(query_file(written(graph, tmp_path / "graph.nt")), NAMESPACE, None)
    nodes = explored.entity("m.s0")
    for number in range(20):  # 20 to the power of 20 paths
        nodes = explored.neighbors(nodes, ("film.studio.films", "film.film.studio")[number % 2])
    assert explored.size(nodes) == 20


@pytest.mark.parametrize("action", ["intersection(#{0}, #{0})", "argmax(#{0}, film.film.length)"])
def test_a_query_does_not_grow_without_bound(file: str, rows: dict[str, str], action: str) -> None:
    environment = KnowledgeGraphEnvironment(data=rows, graph=file, max_turns=100)
    environment.reset(environment.tasks("train")[0])
    environment.step({"agent": Message("assistant", "Action: get_neighbors(Acme, film.studio.films)")})
    shown = []
    for number in range(12):
        step = environment.step({"agent": Message("assistant", f"Action: {action.format(number)}")})
        shown.append(step.observations["agent"][0].content)
    assert "steps to find, more than 200" in next(text for text in shown if text.startswith("Error"))


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "cannot be read as N-Triples"), ("this is no triple\n", "cannot be read as N-Triples")],
)
def test_a_file_that_is_no_graph_is_named(tmp_path: Path, content: str | None, fault: str) -> None:
    path = tmp_path / "graph.nt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=fault) as raised:
        KnowledgeGraphEnvironment(graph=str(path))
    assert str(path) in str(raised.value)


def test_an_endpoint_without_an_answer_is_an_error_not_a_reward() -> None:
    with pytest.raises(RemoteError, match="gave no answer"):
        query_endpoint(f"http://127.0.0.1:{free_port()}/sparql")("SELECT * WHERE {}")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyoxigraph", None)
    with pytest.raises(ConfigurationError, match=r"mrlm\[graph\]"):
        query_file("graph.nt")


@pytest.fixture
def endpoint(file: str) -> Iterator[str]:
    """A SPARQL endpoint of this process that answers for the small graph."""
    query = query_file(file)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            body = json.dumps(query(form["query"][0])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/sparql-results+json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/sparql"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_an_endpoint_plays_the_rows(endpoint: str, rows: dict[str, str]) -> None:
    environment = KnowledgeGraphEnvironment(data=rows, graph=endpoint)
    assert check_data(environment, "train").solved == (1, 2, 3)
