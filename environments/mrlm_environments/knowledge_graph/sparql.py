"""Graphs that answer SPARQL: an N-Triples file in memory, or an endpoint."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mrlm_environments.knowledge_graph.graph import UNTYPED
from mrlm_environments.knowledge_graph.ontology import Ontology
from mrlm_environments.libraries import library
from mrlm_pl.environment.tasks import Shared
from mrlm_pl.environment.tools import ToolError
from mrlm_pl.errors import DataError, RemoteError

SECONDS = 60.0
"""Time limit of a query to an endpoint."""

_XSD = "http://www.w3.org/2001/XMLSchema#"
_DATES = ", ".join(f"<{_XSD}{name}>" for name in ("date", "dateTime", "gYear", "gYearMonth"))
_RANGE = "http://www.w3.org/2000/01/rdf-schema#range"
_ORDERED = f"FILTER(isNumeric(?o) || DATATYPE(?o) IN ({_DATES}))"
_CHARACTER = r"(?:[\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
_LOCAL = re.compile(rf"{_CHARACTER}+")
"""Names that make a valid IRI behind a namespace."""

_FULL = re.compile(rf"https?://[\w.-]+(?::[0-9]{{1,5}})?(?:/{_CHARACTER}*(?:#{_CHARACTER}*)?)?")

MOST_STEPS = 200
"""Steps of a query; variables that combine variables would otherwise double it with each call."""

Program = tuple[Any, ...]
"""Steps that find a set of entities: a kind, the number of steps, and ``entity`` a name, ``neighbors`` a set and a
relation, ``both`` two sets, ``best`` a set, an attribute and whether the largest value is meant."""


class SparqlGraph(Shared):
    """A graph behind SPARQL, with the methods of :class:`~mrlm_environments.knowledge_graph.graph.TripleStore`.

    Its sets are programs, which become one query when their entities are asked for.

    Args:
        query: returns the results of a query in SPARQL's JSON format.
        namespace: beginning of IRIs that names leave out.
        ontology: types of relations, and the relations that are listed; None lists all of the namespace, and takes
            types from ``rdfs:range``.
    """

    def __init__(self, query: Callable[[str], Any], namespace: str, ontology: Ontology | None) -> None:
        self._query, self.namespace, self.ontology = query, namespace, ontology

    def entity(self, name: str) -> Program | None:
        """See :meth:`TripleStore.entity`."""
        if not _LOCAL.fullmatch(name) and not _FULL.fullmatch(name):
            return None
        iri = self._iri(name)
        known = self._rows(f"SELECT ?x WHERE {{ {{ {iri} ?x ?o }} UNION {{ ?s ?x {iri} }} }} LIMIT 1")
        return ("entity", 1, name) if known else None

    def relations(self, nodes: Program) -> list[str]:
        """See :meth:`TripleStore.relations`."""
        return self._edges(nodes, "FILTER(!isLiteral(?o))")

    def attributes(self, nodes: Program) -> list[str]:
        """See :meth:`TripleStore.attributes`."""
        return self._edges(nodes, _ORDERED)

    def neighbors(self, nodes: Program, relation: str) -> Program:
        """See :meth:`TripleStore.neighbors`."""
        return _combine("neighbors", nodes, relation)

    def intersection(self, first: Program, second: Program) -> Program:
        """See :meth:`TripleStore.intersection`."""
        return _combine("both", first, second)

    def best(self, nodes: Program, attribute: str, largest: bool) -> Program:
        """See :meth:`TripleStore.best`."""
        return _combine("best", nodes, attribute, largest)

    def members(self, nodes: Program) -> frozenset[str]:
        """See :meth:`TripleStore.members`."""
        return frozenset(map(self._name, self._rows(f"SELECT DISTINCT ?x WHERE {{ {self._found(nodes)} }}")))

    def size(self, nodes: Program) -> int:
        """See :meth:`TripleStore.size`."""
        return int(self._rows(f"SELECT (COUNT(DISTINCT ?n) AS ?x) WHERE {{ {self._found(nodes, 'n')} }}")[0])

    def type_of(self, relation: str) -> str:
        """See :meth:`TripleStore.type_of`."""
        if self.ontology is not None:
            return self.ontology.types.get(relation, UNTYPED)
        found = self._rows(f"SELECT ?x WHERE {{ {self._iri(relation)} <{_RANGE}> ?x }} ORDER BY ?x LIMIT 1")
        return self._name(found[0]) if found else UNTYPED

    def _edges(self, nodes: Program, condition: str) -> list[str]:
        of_ours = f"FILTER(STRSTARTS(STR(?x), {json.dumps(self.namespace)}))"
        found = self._rows(f"SELECT DISTINCT ?x WHERE {{ {self._found(nodes, 'n')} ?n ?x ?o . {condition} {of_ours} }}")
        names = map(self._name, found)
        return sorted(name for name in names if self.ontology is None or name in self.ontology.types)

    def _found(self, nodes: Program, name: str = "x") -> str:
        """Return the pattern that binds a variable to the entities of a program."""
        return self._pattern(nodes, name, (f"v{number}" for number in itertools.count()))

    def _pattern(self, nodes: Program, name: str, fresh: Iterator[str]) -> str:
        kind, _, first, *rest = nodes
        if kind == "entity":
            return f"VALUES ?{name} {{ {self._iri(first)} }}"
        if kind == "both":
            return f"{self._pattern(first, name, fresh)} {self._pattern(rest[0], name, fresh)}"
        source = next(fresh)
        if kind == "neighbors":
            hop = f"?{source} {self._iri(rest[0])} ?{name} . FILTER(!isLiteral(?{name}))"
            # distinct, else the next hop is made once for each path, whose number doubles with each hop
            return f"{{ SELECT DISTINCT ?{name} WHERE {{ {self._pattern(first, source, fresh)} {hop} }} }}"
        value, attribute = next(fresh), self._iri(rest[0])
        ordered = _ORDERED.replace("?o", f"?{value}")
        best = f"{self._pattern(first, source, fresh)} ?{source} {attribute} ?{value} . {ordered}"
        order = f"ORDER BY {'DESC' if rest[1] else 'ASC'}(?{value}) LIMIT 1"
        return (
            f"{{ SELECT ?{value} WHERE {{ {best} }} {order} }} "
            f"{self._pattern(first, name, fresh)} ?{name} {attribute} ?{value} ."
        )

    def _rows(self, text: str) -> list[str]:
        """Return the values of ?x; Virtuoso adds its time zone to dates."""
        found = self._query(text)["results"]["bindings"]
        return [row["x"]["value"].replace("-08:00", "") for row in found]

    def _iri(self, name: str) -> str:
        return f"<{name}>" if _FULL.fullmatch(name) else f"<{self.namespace}{name}>"

    def _name(self, iri: str) -> str:
        return iri.removeprefix(self.namespace)


def _combine(kind: str, *parts: Any) -> Program:
    """Return the program of a further step.

    Raises:
        ToolError: it has more than :data:`MOST_STEPS`.
    """
    # a best value is looked up among the entities that are then compared with it
    steps = 1 + sum(part[1] for part in parts if isinstance(part, tuple)) * (2 if kind == "best" else 1)
    if steps > MOST_STEPS:
        raise ToolError(f"the variable takes {steps} steps to find, more than {MOST_STEPS}; begin with an entity again")
    return (kind, steps, *parts)


def query_file(path: str) -> Callable[[str], Any]:
    """Return queries of an N-Triples file, which is read into memory.

    Raises:
        ConfigurationError: pyoxigraph is not installed.
        DataError: the file cannot be read.
    """
    pyoxigraph = library("pyoxigraph", "graph", "knowledge_graph: a graph's file")
    store = pyoxigraph.Store()
    try:
        store.bulk_load(path=str(Path(path).expanduser()), format=pyoxigraph.RdfFormat.N_TRIPLES)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"knowledge_graph: graph is {path!r}, which cannot be read as N-Triples ({error}); give such a file, the "
            "URL of a SPARQL endpoint, or 'reconstructed'"
        ) from error
    json_results = pyoxigraph.QueryResultsFormat.JSON
    return lambda text: json.loads(store.query(text).serialize(format=json_results))


def query_endpoint(url: str) -> Callable[[str], Any]:
    """Return queries of a SPARQL endpoint; each raises a :class:`RemoteError` where it has no answer in time."""

    def ask(text: str) -> Any:
        form = urllib.parse.urlencode({"query": text}).encode()
        request = urllib.request.Request(url, form, {"Accept": "application/sparql-results+json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RemoteError(
                f"knowledge_graph: the SPARQL endpoint {url} gave no answer: {error}; see whether it runs, and its log"
            ) from error

    return ask
