"""Houses: receptacles and their places, what they may hold, and what can be done with things."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from mrlm_pl.grouping import grouped

FIRST_PLANS = {"kitchen": 1, "living_room": 201, "bedroom": 301, "bathroom": 401}
OPENABLE = frozenset({"fridge", "cabinet", "microwave", "drawer", "safe"})
ROOMS = {room: range(first, first + 30) for room, first in FIRST_PLANS.items()}
"""Numbers of the floor plans."""

HELD_OUT = 6
"""The first plans of each room, which ALFRED keeps for the test."""

COUNTS = {"stoveburner": 4}
"""Receptacles of a kind that a plan names without places; 1 of other kinds."""


class Receptacle(NamedTuple):
    """A place, which several receptacles may share, and whether the receptacle opens."""

    place: str
    openable: bool


@dataclass(frozen=True)
class House:
    """A house without its state.

    Args:
        receptacles: receptacles by name, such as ``cabinet 1``.
        holds: kinds of objects that a kind of receptacle may hold.
        traits: names or kinds of objects by trait: ``pickupable``, ``cleanable``, ``heatable``, ``coolable``,
            ``sliceable``, ``toggleable`` and ``isreceptacleobject``.
        contents: objects in objects, which no action moves.
    """

    receptacles: Mapping[str, Receptacle]
    holds: Mapping[str, frozenset[str]]
    traits: Mapping[str, frozenset[str]]
    contents: Mapping[str, Sequence[str]]

    @functools.cached_property
    def at(self) -> Mapping[str, Sequence[str]]:
        """The receptacles of each place, listed in ALFWorld's order."""
        return grouped((self.receptacles[name].place, name) for name in listed(self.receptacles))

    def has(self, trait: str, name: str) -> bool:
        """Return whether an object has a trait."""
        return name in self.traits[trait] or kind_of(name) in self.traits[trait]

    def may_hold(self, receptacle: str, name: str) -> bool:
        """Return whether an object may be put in or on a receptacle."""
        return kind_of(name) in self.holds.get(kind_of(receptacle), ())


def kind_of(name: str) -> str:
    """Return the kind of a receptacle or an object.

    >>> kind_of("cabinet 12")
    'cabinet'
    """
    return name.partition(" ")[0]


def listed(names: Iterable[str]) -> list[str]:
    """Return names in ALFWorld's order: by kind, the largest number first.

    >>> listed(["cup 1", "cabinet 9", "cabinet 10"])
    ['cabinet 10', 'cabinet 9', 'cup 1']
    """
    return sorted(names, key=lambda name: (kind_of(name), -int(name.partition(" ")[2] or 0)))


class FloorPlan(NamedTuple):
    """A house and the kinds of objects in it."""

    house: House
    kinds: tuple[str, ...]
    lamps: tuple[str, ...]


@functools.cache
def floor_plan(number: int) -> FloorPlan:
    """Return one of the 120 floor plans.

    Receptacles that a plan names without a place, such as the coffee machine, get their own place.
    """
    data = _floor_plans()
    holds = {kind: frozenset(kinds) for kind, kinds in data["holds"].items()}
    plan = data["plans"][str(number)]
    places = {name: f"loc {place + 1}" for name, place in plan["receptacles"].items()}
    known = {kind_of(name) for name in places}
    for kind in sorted(holds.keys() & set(plan["types"]) - known):
        for count in range(1, COUNTS.get(kind, 1) + 1):
            places[f"{kind} {count}"] = f"loc {len(places) + 1}"
    receptacles = {name: Receptacle(place, kind_of(name) in OPENABLE) for name, place in places.items()}
    traits = {
        **{trait: frozenset(kinds) for trait, kinds in data["traits"].items()},
        "pickupable": frozenset().union(*holds.values()),
        "isreceptacleobject": frozenset(data["movable_receptacles"]),
    }
    house = House(receptacles, holds, traits, {})
    fitting = frozenset().union(*(holds[kind_of(name)] for name in places))
    lamps = tuple(kind for kind in plan["types"] if kind in house.traits["toggleable"])
    return FloorPlan(house, tuple(kind for kind in plan["types"] if kind in fitting), lamps)


@functools.cache
def _floor_plans() -> Mapping[str, Any]:
    packed = resources.files(__package__).joinpath("floor_plans.json.gz").read_bytes()
    return json.loads(gzip.decompress(packed))
