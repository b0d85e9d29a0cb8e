"""A graph of entities in memory, with the operations that the tools need."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, TypeAlias

from mrlm_pl.environment.tasks import Shared

Nodes: TypeAlias = Any
"""A set of entities in the form of the graph that made it; plain data."""

Value: TypeAlias = float | date
"""A literal that can be ordered; the values of one attribute are all numbers or all dates."""

UNTYPED = "common.topic"


class TripleStore(Shared):
    """A graph in memory: dictionaries from entities to their relations and attributes. Its sets are frozen sets.

    It does not change once it is made, so copies of an environment share it.

    Args:
        types: the type of the entities to which each relation leads; :data:`UNTYPED` for others.

    Attributes:
        objects: targets by subject and relation.
        values: numbers or dates by entity and attribute.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self.objects: dict[str, dict[str, set[str]]] = {}
        self.values: dict[str, dict[str, Value]] = {}

    def add(self, subject: str, relation: str, target: str, inverse: str | None = None) -> None:
        """Add a triple, and the one in the other direction where the relation has an inverse."""
        self.objects.setdefault(subject, {}).setdefault(relation, set()).add(target)
        other = self.objects.setdefault(target, {})
        if inverse is not None:
            other.setdefault(inverse, set()).add(subject)

    def add_value(self, entity: str, attribute: str, value: Value) -> None:
        """Add the value of an entity's attribute; an earlier one is replaced."""
        self.objects.setdefault(entity, {})
        self.values.setdefault(entity, {})[attribute] = value

    def entity(self, name: str) -> frozenset[str] | None:
        """Return the set of the one entity with this identifier, or None if the graph has no such entity."""
        return frozenset((name,)) if name in self.objects else None

    def relations(self, nodes: frozenset[str]) -> list[str]:
        """Return the relations that leave at least one of the entities, sorted."""
        return sorted({relation for node in nodes for relation in self.objects.get(node, ())})

    def attributes(self, nodes: frozenset[str]) -> list[str]:
        """Return the attributes with numbers or dates of at least one of the entities, sorted."""
        return sorted({attribute for node in nodes for attribute in self.values.get(node, ())})

    def neighbors(self, nodes: frozenset[str], relation: str) -> frozenset[str]:
        """Return the entities to which a relation leads from any of the entities."""
        return frozenset().union(*(self.objects.get(node, {}).get(relation, ()) for node in nodes))

    def intersection(self, first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
        """Return the entities that are in both sets."""
        return first & second

    def best(self, nodes: frozenset[str], attribute: str, largest: bool) -> frozenset[str]:
        """Return the entities with the largest, or smallest, value of an attribute: several where values are equal."""
        found = {node: self.values[node][attribute] for node in nodes if attribute in self.values.get(node, ())}
        extreme = (max if largest else min)(found.values(), default=None)
        return frozenset(node for node, value in found.items() if value == extreme)

    def members(self, nodes: frozenset[str]) -> frozenset[str]:
        """Return the identifiers of the entities."""
        return nodes

    def size(self, nodes: frozenset[str]) -> int:
        """Return the number of entities."""
        return len(nodes)

    def type_of(self, relation: str) -> str:
        """Return the type of the entities to which a relation leads."""
        return self._types.get(relation, UNTYPED)
