"""A small graph made by hand, as triples in memory and as N-Triples."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from mrlm_environments.knowledge_graph.graph import TripleStore, Value

NAMESPACE = "http://rdf.freebase.com/ns/"
XSD = "http://www.w3.org/2001/XMLSchema#"

TYPES = {"film.studio.films": "film.film", "film.film.studio": "film.studio", "film.film.cast": "film.actor"}
TRIPLES = [
    ("m.s1", "film.studio.films", "m.f1"),
    ("m.s1", "film.studio.films", "m.f2"),
    ("m.s1", "film.studio.films", "m.f3"),
    ("m.s2", "film.studio.films", "m.f3"),
    ("m.f1", "film.film.cast", "m.a1"),
    ("m.f2", "film.film.cast", "m.a1"),
    ("m.f2", "film.film.cast", "m.a2"),
]
VALUES = [
    ("m.f1", "film.film.length", 90),
    ("m.f2", "film.film.length", 100),  # as texts, "90" is larger
    ("m.f3", "film.film.length", 100),
    ("m.f1", "film.film.released", date(1999, 12, 31)),
    ("m.f2", "film.film.released", date(2001, 1, 2)),
]


def small_graph() -> TripleStore:
    """Return the graph in memory; studios have films with an inverse, films have a cast without one."""
    graph = TripleStore(TYPES)
    for subject, relation, target in TRIPLES:
        graph.add(subject, relation, target, "film.film.studio" if relation == "film.studio.films" else None)
    for entity, attribute, value in VALUES:
        graph.add_value(entity, attribute, value)
    return graph


def triples(graph: TripleStore) -> list[tuple[str, str, str]]:
    """Return all triples between entities."""
    return [(s, r, o) for s, relations in graph.objects.items() for r, targets in relations.items() for o in targets]


def values(graph: TripleStore) -> list[tuple[str, str, Value]]:
    """Return entity, attribute and value of each value."""
    return [(entity, name, value) for entity, own in graph.values.items() for name, value in own.items()]


def written(graph: TripleStore, path: Path, types: dict[str, str] | None = None) -> str:
    """Write a graph as N-Triples, with the relations' types, and return the path."""
    lines = [f"<{NAMESPACE}{s}> <{NAMESPACE}{r}> <{NAMESPACE}{o}> ." for s, r, o in triples(graph)]
    # of another namespace, which is no relation to explore
    lines.append(f"<{NAMESPACE}m.s1> <http://www.w3.org/1999/02/22-rdf-syntax-ns#type> <{NAMESPACE}film.studio> .")
    for entity, attribute, value in values(graph):
        kind = "date" if isinstance(value, date) else "integer"
        lines.append(f'<{NAMESPACE}{entity}> <{NAMESPACE}{attribute}> "{value}"^^<{XSD}{kind}> .')
    schema = "http://www.w3.org/2000/01/rdf-schema#range"
    lines += [f"<{NAMESPACE}{name}> <{schema}> <{NAMESPACE}{kind}> ." for name, kind in (types or {}).items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
