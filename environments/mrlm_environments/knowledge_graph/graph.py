"""Graphs of entities: the operations that the tools need, and a store in memory that offers them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import date
from typing import Any, TypeAlias

Nodes: TypeAlias = Any
"""A set of entities in the form of the graph that made it; plain data."""

Value: TypeAlias = float | date
"""A literal that can be ordered; the values of one attribute are all numbers or all dates."""

UNTYPED = "common.topic"


class Graph(ABC):
    """A graph to explore. It does not change, so copies of an environment share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self

    @abstractmethod
    def entity(self, name: str) -> Nodes | None:
        """Return the set of the one entity with this identifier, or None if the graph has no such entity."""

    @abstractmethod
    def relations(self, nodes: Nodes) -> list[str]:
        """Return the relations that leave at least one of the entities, sorted."""

    @abstractmethod
    def attributes(self, nodes: Nodes) -> list[str]:
        """Return the attributes with numbers or dates of at least one of the entities, sorted."""

    @abstractmethod
    def neighbors(self, nodes: Nodes, relation: str) -> Nodes:
        """Return the entities to which a relation leads from any of the entities."""

    @abstractmethod
    def intersection(self, first: Nodes, second: Nodes) -> Nodes:
        """Return the entities that are in both sets."""

    @abstractmethod
    def best(self, nodes: Nodes, attribute: str, largest: bool) -> Nodes:
        """Return the entities with the largest, or smallest, value of an attribute: several where values are equal."""

    @abstractmethod
    def members(self, nodes: Nodes) -> frozenset[str]:
        """Return the identifiers of the entities."""

    @abstractmethod
    def size(self, nodes: Nodes) -> int:
        """Return the number of entities."""

    @abstractmethod
    def type_of(self, relation: str) -> str:
        """Return the type of the entities to which a relation leads."""


class TripleStore(Graph):
    """A graph in memory: dictionaries from entities to their relations and attributes. Its sets are frozen sets.

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
        """See :meth:`Graph.entity`."""
        return frozenset((name,)) if name in self.objects else None

    def relations(self, nodes: frozenset[str]) -> list[str]:
        """See :meth:`Graph.relations`."""
        return sorted({relation for node in nodes for relation in self.objects.get(node, ())})

    def attributes(self, nodes: frozenset[str]) -> list[str]:
        """See :meth:`Graph.attributes`."""
        return sorted({attribute for node in nodes for attribute in self.values.get(node, ())})

    def neighbors(self, nodes: frozenset[str], relation: str) -> frozenset[str]:
        """See :meth:`Graph.neighbors`."""
        return frozenset().union(*(self.objects.get(node, {}).get(relation, ()) for node in nodes))

    def intersection(self, first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
        """See :meth:`Graph.intersection`."""
        return first & second

    def best(self, nodes: frozenset[str], attribute: str, largest: bool) -> frozenset[str]:
        """See :meth:`Graph.best`."""
        found = {node: self.values[node][attribute] for node in nodes if attribute in self.values.get(node, ())}
        extreme = (max if largest else min)(found.values(), default=None)
        return frozenset(node for node, value in found.items() if value == extreme)

    def members(self, nodes: frozenset[str]) -> frozenset[str]:
        """See :meth:`Graph.members`."""
        return nodes

    def size(self, nodes: frozenset[str]) -> int:
        """See :meth:`Graph.size`."""
        return len(nodes)

    def type_of(self, relation: str) -> str:
        """See :meth:`Graph.type_of`."""
        return self._types.get(relation, UNTYPED)
