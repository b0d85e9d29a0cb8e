"""Generated graphs: a schema for each split, and entities with relations and attributes by chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache, lru_cache
from pathlib import Path
from random import Random

import yaml

from mrlm_environments.knowledge_graph.graph import TripleStore
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.seeding import keyed_random

WORLDS = 8
"""Graphs of each split."""

MOST_TARGETS = 4
_FIRST_DAY, _DAYS = date(1900, 1, 1), 36_500
_SYLLABLES = (
    *("ba", "cor", "den", "dra", "el", "fen", "gar", "hal", "ira", "jo", "kel", "lu", "mar", "nor"),
    *("os", "pel", "qui", "ran", "sil", "tor", "ul", "ven", "wil", "xan", "yor", "zim"),
)


@dataclass(frozen=True)
class Relation:
    """One direction of a relation: ``phrase`` follows the target's plural and precedes the source in a question."""

    name: str
    source: str
    target: str
    phrase: str
    inverse: str
    backward: bool


@dataclass(frozen=True)
class Attribute:
    """A number or date of a class, and how a question names its extremes."""

    name: str
    owner: str
    is_date: bool
    largest: str
    smallest: str


@dataclass(frozen=True)
class Schema:
    """Classes with their plurals, relations in both directions, and attributes."""

    classes: Mapping[str, str]
    relations: Sequence[Relation]
    attributes: Sequence[Attribute]


@dataclass(frozen=True)
class World:
    """A generated graph with its schema, and the identifiers of its entities by class and by name."""

    schema: Schema
    graph: TripleStore
    members: Mapping[str, Sequence[str]]
    names: Mapping[str, str]


@cache
def schema(split: str) -> Schema:
    """Return the schema of a split; names begin with the theme and the class, as in Freebase."""
    theme = yaml.safe_load(Path(__file__).with_name("themes.yaml").read_text(encoding="utf-8"))[split]
    full = {name: f"{theme['name']}.{name}" for name in theme["classes"]}
    relations: list[Relation] = []
    for line in theme["relations"]:
        there, back, phrase, other = line.split(" | ")
        source, target = there.partition(".")[0], back.partition(".")[0]
        there, back = f"{theme['name']}.{there}", f"{theme['name']}.{back}"
        relations += (
            Relation(there, full[source], full[target], phrase, back, backward=False),
            Relation(back, full[target], full[source], other, there, backward=True),
        )
    attributes = []
    for line in theme["attributes"]:
        name, kind, largest, smallest = line.split(" | ")
        owner = full[name.partition(".")[0]]
        attributes.append(Attribute(f"{theme['name']}.{name}", owner, kind == "date", largest, smallest))
    return Schema({full[name]: plural for name, plural in theme["classes"].items()}, relations, attributes)


@lru_cache(maxsize=4 * WORLDS)
def world(split: str, number: int, entities: int) -> World:
    """Return a graph of a split, a function of its number and size.

    Args:
        split: split of the graph; its schema and its entities' names occur in no other split.
        number: index of the graph, below :data:`WORLDS`.
        entities: number of entities, shared evenly by the classes.
    """
    rng, plan = keyed_random("knowledge_graph", split, number, entities), schema(split)
    names: dict[str, str] = {}
    members: dict[str, list[str]] = {name: [] for name in plan.classes}
    while len(names) < entities:
        name = _name(rng)
        if name not in names and split_of(name) == split:
            names[name] = f"m.{split[:2]}{number}_{len(names)}"
            members[list(members)[len(names) % len(members)]].append(names[name])
    graph = TripleStore({relation.name: relation.target for relation in plan.relations})
    for relation in plan.relations[::2]:
        for source in members[relation.source]:
            others = [one for one in members[relation.target] if one != source]
            for target in rng.sample(others, rng.randint(1, MOST_TARGETS)):
                graph.add(source, relation.name, target, relation.inverse)
    for attribute in plan.attributes:
        for entity in members[attribute.owner]:
            day = rng.randrange(_DAYS)
            graph.add_value(entity, attribute.name, _FIRST_DAY + timedelta(day) if attribute.is_date else day)
    return World(plan, graph, members, names)


def _name(rng: Random) -> str:
    words = ("".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))) for _ in range(2))
    return " ".join(word.capitalize() for word in words)
