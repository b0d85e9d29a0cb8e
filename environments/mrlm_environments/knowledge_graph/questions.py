"""Generated questions about a generated graph, each with a program whose every single wrong step is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Literal, get_args

from mrlm_environments.knowledge_graph.exploration import Exploration
from mrlm_environments.knowledge_graph.graph import TripleStore
from mrlm_environments.knowledge_graph.world import WORLDS, Relation, World, world
from mrlm_pl.environment import SPLITS, Task, TaskSource
from mrlm_pl.environment.tools import ToolError
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.seeding import derive_seed, keyed_random
from mrlm_pl.settings import one_of

Kind = Literal["join", "reverse", "and", "count", "argmax", "argmin"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MOST_ANSWERS = 40
ATTEMPTS = 1000
_ASKED = {
    "which": ("Which are the {}?", "Name the {}.", "List all {}.", "Find the {}."),
    "count": ("How many {} are there?", "Give the number of {}.", "Count the {}."),
    "best": ("Which of the {} has the {}?", "Among the {}, which has the {}?", "Of the {}, find the one with the {}."),
}

Step = tuple[str, ...]
"""Tool and arguments of a call."""

Drawn = tuple[str, list[Step], list[str]]
"""A question, its program and the names of its entities."""


class WorldTasks(TaskSource):
    """Endless questions about the graphs of a split, whose entities and schemas occur in no other.

    Args:
        environment: the environment's name.
        split: ``train``, ``validation`` or ``test``.
        kinds: see :func:`generate_question`, as the other arguments.
        hops: minimum and maximum number of relations.
        entities: number of entities of each graph.

    Raises:
        ConfigurationError: the split is unknown.
    """

    def __init__(
        self, environment: str, split: str, kinds: Sequence[Kind], hops: tuple[int, int], entities: int
    ) -> None:
        one_of(SPLITS, f"{environment}: ", split=split)
        self.environment, self.split, self.kinds, self.hops, self.entities = environment, split, kinds, hops, entities

    def __getitem__(self, index: int) -> Task:
        self._check_index(index)
        key = ("task", self.environment, self.split, index)
        data = generate_question(keyed_random(*key), self.split, self.kinds, self.hops, self.entities)
        return Task(self.environment, self.split, index, derive_seed(*key), data)


def generate_question(
    rng: Random, split: str, kinds: Sequence[Kind], hops: tuple[int, int], entities: int
) -> dict[str, Any]:
    """Return a question's data: question, entities, actions (the program), answer, world, kind and hops.

    Every program that differs in one step (relation, attribute, direction of the extreme, entity, operand of the
    intersection, final variable) fails or gives another answer.

    Args:
        rng: source of all choices.
        split: split of the graph.
        kinds: operators to choose from.
        hops: minimum and maximum number of relations on the longest path from an entity to the answer.
        entities: number of entities of the graph.

    Raises:
        ConfigurationError: no such question was found; the graph is too small.
    """
    number, kind, depth = rng.randrange(WORLDS), rng.choice(list(kinds)), rng.randint(*hops)
    home = world(split, number, entities)
    for _ in range(ATTEMPTS):
        drawn = _draw_question(rng, home, kind, depth)
        if drawn is None:
            continue
        question, program, named = drawn
        answer = _result(home.graph, program)
        if answer and all(_result(home.graph, wrong) != answer for wrong in _corruptions(home.graph, program)):
            return {
                "question": question,
                "entities": {name: home.names[name] for name in named},
                "actions": [f"{tool}({','.join(arguments)})" for tool, *arguments in _with_lookups(program)],
                "answer": sorted(answer),
                "world": {"split": split, "number": number, "entities": entities},
                "kind": kind,
                "hops": depth,
            }
    raise ConfigurationError(
        f"knowledge_graph: no {kind!r} question of {depth} hops was found among {entities} entities; raise `entities`"
    )


def _draw_question(rng: Random, home: World, kind: Kind, hops: int) -> Drawn | None:
    """Return a candidate; None where the random choices do not fit the kind."""
    start = rng.choice(list(home.names))
    path = _path(rng, home, home.names[start], hops)
    if kind in ("join", "reverse") and any(relation.backward for relation in path) != (kind == "reverse"):
        return None
    phrase, last, nodes = start, home.names[start], frozenset((home.names[start],))
    if len(home.graph.relations(nodes)) < 2:
        return None
    program: list[Step] = []
    for place, relation in enumerate(path):  # the phrase grows as in ``made by the studios that ...``
        phrase = f"{relation.phrase} {f'the {home.schema.classes[relation.source]} ' if place else ''}{phrase}"
        program.append(("get_neighbors", last, relation.name))
        nodes, last = home.graph.neighbors(nodes, relation.name), f"#{place}"
    if not 1 <= len(nodes) <= MOST_ANSWERS:
        return None
    plural = home.schema.classes[path[-1].target]
    if kind in ("join", "reverse"):
        return rng.choice(_ASKED["which"]).format(f"{plural} {phrase}"), program, [start]
    if kind == "count":
        question = rng.choice(_ASKED["count"]).format(f"{plural} {phrase}")
        return (question, [*program, ("count", last)], [start]) if len(nodes) > 1 else None
    if kind == "and":
        back = rng.choice([relation for relation in home.schema.relations if relation.target == path[-1].target])
        ids = {identifier: name for name, identifier in home.names.items()}
        known = sorted(home.graph.neighbors(frozenset((rng.choice(sorted(nodes)),)), back.inverse))
        if not known or ids[known[0]] == start or back == path[-1]:
            return None
        other = ids[rng.choice(known)]
        both = f"{plural} {back.phrase} {other} and {phrase}"
        program += [("get_neighbors", home.names[other], back.name), ("intersection", last, f"#{len(path)}")]
        return rng.choice(_ASKED["which"]).format(both), program, [start, other]
    owned = [attribute for attribute in home.schema.attributes if attribute.owner == path[-1].target]
    if not owned or len(nodes) < 3:
        return None
    attribute = rng.choice(owned)
    extreme = attribute.largest if kind == "argmax" else attribute.smallest
    question = rng.choice(_ASKED["best"]).format(f"{plural} {phrase}", extreme)
    return question, [*program, (kind, last, attribute.name)], [start]


def _path(rng: Random, home: World, entity: str, hops: int) -> list[Relation]:
    """Return relations that can follow each other from an entity, none of them the way back of the one before."""
    owner = next(name for name, members in home.members.items() if entity in members)
    path: list[Relation] = []
    for _ in range(hops):
        back = path[-1].inverse if path else ""
        path.append(rng.choice([one for one in home.schema.relations if one.source == owner and one.name != back]))
        owner = path[-1].target
    return path


def _with_lookups(program: Sequence[Step]) -> Iterator[Step]:
    """Yield the calls with the ones before them that list relations and attributes."""
    for step in program:
        if step[0] == "get_neighbors":
            yield ("get_relations", step[1])
        elif step[0] in ("argmax", "argmin"):
            yield ("get_attributes", step[1])
        yield step


def _result(graph: TripleStore, program: Sequence[Step]) -> frozenset[str]:
    """Return a program's answer; the empty set where it fails."""
    try:
        return Exploration(graph, {}).run(f"{tool}({','.join(arguments)})" for tool, *arguments in program)
    except ToolError:
        return frozenset()


def _corruptions(graph: TripleStore, program: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the programs with one wrong step, and those that stop at an earlier variable."""
    explored = Exploration(graph, {})
    entities = {step[1] for step in program if not step[1].startswith("#")}
    for place, (tool, first, *rest) in enumerate(program):
        before, after = list(program[:place]), list(program[place + 1 :])
        nodes = explored.variables[int(first[1:])].nodes if first.startswith("#") else frozenset((first,))
        made = [f"#{number}" for number in range(len(explored.variables))]
        wrong: list[Step] = []
        if tool == "get_neighbors":
            wrong += [(tool, first, name) for name in graph.relations(nodes) if name != rest[0]]
            wrong += [(tool, other, rest[0]) for other in (*entities, *made) if other != first]
        elif tool == "intersection":
            pairs = itertools.combinations_with_replacement(made, 2)
            wrong += [(tool, *pair) for pair in pairs if {*pair} != {first, *rest}]
        else:
            wrong += [(tool, other, *rest) for other in made if other != first]
        if tool in ("argmax", "argmin"):
            wrong += [(tool, first, name) for name in graph.attributes(nodes) if name != rest[0]]
            wrong.append(({"argmax": "argmin", "argmin": "argmax"}[tool], first, rest[0]))
        for step in wrong:
            yield [*before, step, *after]
        if before:
            yield before
        explored.run([f"{tool}({','.join((first, *rest))})"])
