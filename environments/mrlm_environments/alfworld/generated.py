"""Generated games: objects in the receptacles of a floor plan, and one of the six goals."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from mrlm_environments.alfworld.expert import solution
from mrlm_environments.alfworld.game import MIDDLE, TREATMENTS, Game, Kind, State
from mrlm_environments.alfworld.house import HELD_OUT, ROOMS, floor_plan, kind_of
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.errors import ConfigurationError

COPIES = 3
"""The most objects of a kind."""

ATTEMPTS = 10_000
LAMP_STANDS = ("desk", "sidetable", "dresser", "coffeetable", "diningtable", "shelf", "countertop")


class Goal(NamedTuple):
    """Rooms in which ALFRED poses a goal, and its texts."""

    rooms: tuple[str, ...]
    texts: tuple[str, ...]


GOALS: Mapping[Kind, Goal] = {
    "pick": Goal(tuple(ROOMS), ("put a {o} in {r}", "put some {o} on {r}")),
    "look": Goal(("living_room", "bedroom"), ("look at {o} under the {r}", "examine the {o} with the {r}")),
    "clean": Goal(("kitchen", "bathroom"), ("put a clean {o} in {r}", "clean some {o} and put it in {r}")),
    "heat": Goal(("kitchen",), ("put a hot {o} in {r}", "heat some {o} and put it in {r}")),
    "cool": Goal(("kitchen",), ("put a cool {o} in {r}", "cool some {o} and put it in {r}")),
    "pick_two": Goal(tuple(ROOMS), ("put two {o} in {r}", "find two {o} and put them in {r}")),
}


def generated_game(
    rng: Random, split: str, kinds: Sequence[Kind], rooms: Sequence[str], steps: tuple[int, int]
) -> dict[str, Any]:
    """Return a game's data: plan, kind, target, destination, instruction, and the receptacle of each object.

    Args:
        rng: source of all choices.
        split: ``test`` has the plans that ALFRED keeps for its test; the others have other goals in each other plan.
        kinds: kinds of goals to choose from.
        rooms: rooms to choose from; a kind of goal takes those in which ALFRED poses it.
        steps: minimum and maximum number of actions in which the expert wins.

    Raises:
        ConfigurationError: no game of these settings was found.
    """
    for _ in range(ATTEMPTS):
        kind = rng.choice(kinds)
        plans = [ROOMS[room] for room in GOALS[kind].rooms if room in rooms]
        if not plans:
            continue
        plan = rng.choice(plans)
        number = rng.choice(plan[:HELD_OUT] if split == "test" else plan[HELD_OUT:])
        goals = _goals(number, kind)
        if not goals:
            continue
        target, destination = rng.choice(goals)
        data: dict[str, Any] = {"plan": number, "kind": kind, "target": target, "destination": destination}
        if split_of(identity(data)) != split:
            continue
        data["instruction"] = rng.choice(GOALS[kind].texts).format(o=target, r=destination)
        data["objects"] = _place_objects(rng, number, target, destination, 2 if kind == "pick_two" else 1)
        if steps[0] <= len(solution(generated(data), steps[1])):
            return data
    raise ConfigurationError(
        f"alfworld: none of {ATTEMPTS} games of kinds {', '.join(kinds)} in rooms {', '.join(rooms)} takes the expert "
        f"{steps[0]} to {steps[1]} actions; widen the choice"
    )


def identity(data: Mapping[str, Any]) -> str:
    """Return text that is equal for equal goals in equal plans."""
    return " ".join(str(data[name]) for name in ("plan", "kind", "target", "destination"))


def generated(data: Mapping[str, Any]) -> Game:
    """Return the game that the data of :func:`generated_game` describes."""
    house = floor_plan(data["plan"]).house
    near = {name: [house.receptacles[own].place for own in places] for name, places in data["objects"].items()}
    start = State(MIDDLE, data["objects"], near)
    return Game(house, data["kind"], data["target"], data["destination"], data["instruction"], start)


@functools.cache
def _goals(number: int, kind: Kind) -> Sequence[tuple[str, str]]:
    """Return the kinds of objects with their destinations that a plan has for a kind of goal."""
    house, kinds, lamps = floor_plan(number)
    if kind == "look":
        return [(own, lamp) for own in kinds for lamp in lamps]
    receptacles = Counter(map(kind_of, house.receptacles))
    helper, trait, _ = TREATMENTS.get(kind, ("", "pickupable", ""))
    return [
        (own, destination)
        for own in kinds
        for destination in sorted(receptacles)
        if house.has(trait, own) and own in house.holds[destination] and destination != helper
        if any(own in house.holds[other] for other in receptacles if other != destination)
    ]


def _place_objects(rng: Random, number: int, target: str, destination: str, least: int) -> dict[str, list[str]]:
    """Return the receptacle of each object, with ``least`` of the target or more and none in its destination."""
    house, kinds, lamps = floor_plan(number)
    objects: dict[str, list[str]] = {}
    for own in kinds:
        fitting = [name for name in house.receptacles if house.may_hold(name, own)]
        if own == target:
            fitting = [name for name in fitting if kind_of(name) != destination]
        for count in range(1, rng.randint(least if own == target else 1, COPIES) + 1):
            objects[f"{own} {count}"] = [rng.choice(fitting)]
    stands = [name for name in house.receptacles if kind_of(name) in LAMP_STANDS]
    return objects | {f"{lamp} 1": [rng.choice(stands)] for lamp in lamps}
