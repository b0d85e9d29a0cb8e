"""Small graphs for real questions, in which a question's program gives its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from mrlm_environments.knowledge_graph.exploration import Exploration, read_action
from mrlm_environments.knowledge_graph.graph import TripleStore
from mrlm_environments.knowledge_graph.ontology import Ontology
from mrlm_pl.environment.tools import ToolError
from mrlm_pl.errors import DataError
from mrlm_pl.seeding import keyed_random

MOST_BETWEEN = 3
"""Invented entities that a hop without a known result leads to."""

BESIDE = 2
"""Invented entities that only one operand of an intersection has, or that an extreme leaves out."""

WRONG_RELATIONS = 6
WRONG_ATTRIBUTES = 2
BEST = 1000

MOST_COUNTED = 10_000
"""Largest answer of a count, all of whose entities are made."""

Made = tuple[str, int | str, Any]
"""Tool and operands of a variable: numbers of variables, else entities, relations and attributes."""


def reconstructed(data: Mapping[str, Any], ontology: Ontology) -> TripleStore:
    """Return a graph in which the program of a question gives its answer, a function of the question.

    The program is followed backwards from the answer: a hop gets invented entities where its result is not known, both
    operands of an intersection get the result and others, a count gets as many entities as it says, an extreme the best
    value and others worse ones. Relations lead back by their inverse where the answer stays the same. Then relations
    and attributes of the right classes are added that lead elsewhere.

    Raises:
        DataError: no such graph was found.
    """
    rng = keyed_random("reconstruction", data["question"], *data["actions"])
    made = _variables(data["actions"])
    answer = frozenset(data["answer"])
    for inverses in (ontology.inverses, {}):
        building = _Building(rng, ontology, inverses)
        building.follow(made, answer)
        try:
            found = Exploration(building.graph, data["entities"]).run(data["actions"])
        except ToolError:
            continue
        if found == answer:
            building.add_wrong_ways(made)
            return building.graph
    raise DataError(f"no graph was found in which the program {data['actions']} gives the answer {sorted(answer)[:5]}")


def _variables(actions: Iterable[str]) -> list[Made]:
    """Return the variables of a program.

    Raises:
        DataError: the program names a variable that it has not made, or makes none.
    """
    made: list[Made] = []
    for action in actions:
        tool, arguments = read_action(action) or ("", {})
        if tool in ("", "get_relations", "get_attributes"):
            continue
        try:
            operands = [int(name[1:]) if name[:1] == "#" else name for name in arguments.values()]
        except ValueError as error:
            raise DataError(f"{action!r} names no variable") from error
        if any(isinstance(operand, int) and operand >= len(made) for operand in operands):
            raise DataError(f"{action!r} names a variable that the program has not made")
        made.append((tool, operands[0], operands[1] if len(operands) > 1 else None))
    if not made:
        raise DataError(f"the program {list(actions)} makes no variable")
    return made


class _Building:
    """A graph that grows. ``results`` are the entities of each variable."""

    def __init__(self, rng: Random, ontology: Ontology, inverses: Mapping[str, str]) -> None:
        self.rng, self.ontology, self.inverses = rng, ontology, inverses
        self.graph = TripleStore(ontology.types)
        self.results: list[set[str]] = []
        self.invented = 0

    def follow(self, made: Sequence[Made], answer: frozenset[str]) -> None:
        """Add the entities, triples and values that the program needs."""
        self.results = [set() for _ in made]
        self.results[-1] |= answer
        for place in reversed(range(len(made))):
            tool, first, second = made[place]
            result = self.results[place]
            if not result:
                result.update(self._invent(self.rng.randint(1, MOST_BETWEEN)))
            if tool == "count":
                number = int(min(result)) if min(result).isdecimal() else 0
                if number > MOST_COUNTED:
                    raise DataError(f"the answer counts {number} entities, more than {MOST_COUNTED}")
                self._want(first, self._invent(number))
            elif tool == "intersection":
                self._want(first, {*result, *self._invent(BESIDE)})
                self._want(second, {*result, *self._invent(BESIDE)})
            elif tool in ("argmax", "argmin"):
                sign = 1 if tool == "argmax" else -1
                others = self._invent(BESIDE)
                self._want(first, {*result, *others})
                for number, entity in enumerate((*sorted(result), *others)):
                    worse = max(0, number + 1 - len(result))
                    self.graph.add_value(entity, second, sign * (BEST - worse))
        for place, (tool, first, second) in enumerate(made):
            if tool == "get_neighbors":
                sources = sorted(self.results[first]) if isinstance(first, int) else [first]
                targets = sorted(self.results[place])
                for number in range(max(len(sources), len(targets))):
                    source, target = sources[number % len(sources)], targets[number % len(targets)]
                    self.graph.add(source, second, target, self.inverses.get(second))

    def add_wrong_ways(self, made: Sequence[Made]) -> None:
        """Add relations and attributes of the right classes that the program does not use."""
        used = {name for _, _, name in made if isinstance(name, str)}
        used |= {self.ontology.inverses.get(name, "") for name in used}
        for place, (tool, first, name) in enumerate(made):
            if tool == "get_neighbors":
                if isinstance(first, str):
                    self._wander(first, self.ontology.owners.get(name, ""), used, WRONG_RELATIONS)
                for entity in sorted(self.results[place])[:MOST_BETWEEN]:
                    self._wander(entity, self.ontology.types.get(name, ""), used, WRONG_RELATIONS)

    def _wander(self, entity: str, owner: str, used: set[str], most: int) -> None:
        """Add relations that lead from an entity to invented ones, and from these further."""
        known = [one for one in self.ontology.relations.get(owner, ()) if one not in used]
        for relation in self.rng.sample(known, min(most, len(known))):
            (target,) = self._invent(1)
            self.graph.add(entity, relation, target, self.ontology.inverses.get(relation))
            if most == WRONG_RELATIONS:
                self._wander(target, self.ontology.types[relation], used, most // 2)
        values = [one for one in self.ontology.attributes.get(owner, ()) if one not in used]
        for attribute in self.rng.sample(values, min(WRONG_ATTRIBUTES, len(values))):
            self.graph.add_value(entity, attribute, self.rng.randrange(BEST))

    def _want(self, variable: int | str, entities: Iterable[str]) -> None:
        if isinstance(variable, int):
            self.results[variable].update(entities)

    def _invent(self, count: int) -> tuple[str, ...]:
        self.invented += count
        return tuple(f"m.invented_{number}" for number in range(self.invented - count, self.invented))
