"""Generated games as ALFWorld's files, and what TextWorld shows in them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from mrlm_environments import AlfWorldEnvironment
from mrlm_environments.alfworld.expert import solution
from mrlm_environments.alfworld.game import KINDS, MIDDLE, TREATMENTS, Game, State, Wording
from mrlm_environments.alfworld.generated import generated
from mrlm_environments.alfworld.house import House, Receptacle, kind_of

PLAYER = "MRLM_TEXTWORLD_PYTHON"
"""Variable that names the Python of a virtual environment with ``textworld[pddl]``."""

_GOAL = "(:goal (and (exists (?r - receptacle) (exists (?o - object) (and {treated} (inReceptacle ?o ?r) {types})))))"
_TWO = (
    "(:goal (and (exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {o}Type) (receptacleType ?r "
    "{r}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 {o}Type) "
    "(receptacleType ?r {r}Type) (inReceptacle ?o2 ?r))))))))"
)
_LOOK = (
    "(:goal (and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {r}Type) "
    "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) "
    "(exists (?o - object ?a - agent) (and (objectType ?o {o}Type) (holds ?a ?o)))))"
)


def identifier(name: str) -> str:
    """An identifier for which ALFWorld finds the name: the first in alphabetical order has the largest number."""
    kind, number = name.split()
    whole = kind.removesuffix("basin")
    return f"{whole}_bar_{999 - int(number):03d}" + f"_bar_{kind}" * (whole != kind)


def problem(game: Game, contents: Mapping[str, str]) -> str:
    """A game as a problem of ALFWorld's domain, with objects in objects."""
    house, start = game.house, game.start
    kinds = {kind_of(name) for name in start.inside}
    receptacle_kinds = {kind_of(name) for name in house.receptacles}
    places = {start.place, *(own.place for own in house.receptacles.values())}
    types = {"agent1": "agent"}
    types |= {identifier(name): "object" for name in start.inside}
    types |= {identifier(name): "receptacle" for name in house.receptacles}
    types |= {identifier(name): "location" for name in places}
    types |= {f"{kind}Type": "otype" for kind in kinds} | {f"{kind}Type": "rtype" for kind in receptacle_kinds}
    facts: list[tuple[str, ...]] = [("atLocation", "agent1", start.place)]
    for name, own in house.receptacles.items():
        facts += [("receptacleAtLocation", name, own.place), ("receptacleType", name, f"{kind_of(name)}Type")]
        facts += [("openable", name)] * own.openable
    for name, inside in start.inside.items():
        facts += [("objectType", name, f"{kind_of(name)}Type"), *(("inReceptacle", name, own) for own in inside)]
        facts += [("objectAtLocation", name, place) for place in start.near[name]]
        facts += [(trait, name) for trait in house.traits if house.has(trait, name)]
    facts += [("inReceptacleObject", inner, outer) for inner, outer in contents.items()]
    pairs = [(one, other) for one in receptacle_kinds for other in kinds & house.holds.get(one, frozenset())]
    facts += [("canContain", f"{one}Type", f"{other}Type") for one, other in pairs]
    form = {"o": game.target, "r": game.destination}
    goal = {"look": _LOOK, "pick_two": _TWO}.get(game.kind, "").format(**form)
    if not goal:
        treated = "({1} ?o) ({2} ?o)".format(*TREATMENTS[game.kind]) if game.kind in TREATMENTS else ""
        goal = _GOAL.format(treated=treated, types="(objectType ?o {o}Type) (receptacleType ?r {r}Type)".format(**form))
    stated = [f"({fact} {' '.join(identifier(own) if ' ' in own else own for own in names)})" for fact, *names in facts]
    declared = "\n".join(f"{name} - {kind}" for name, kind in sorted(types.items()))
    init = "\n".join(sorted(stated))
    return f"(define (problem p) (:domain alfred)\n(:objects\n{declared}\n)\n(:init\n{init}\n)\n{goal})"


def game_file(game: Game, grammar: str, contents: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The content of a file ``game.tw-pddl`` but for the domain."""
    posed = grammar.replace("UNKNOWN GOAL", game.instruction)
    return {"pddl_problem": problem(game, contents or {}), "grammar": posed, "solvable": True, "walkthrough": None}


def walk(game: Game, seed: int, steps: int) -> list[str]:
    """Admissible actions of verbs drawn at random, two texts that do nothing, and the expert's actions after them."""
    rng, state, actions = Random(seed), game.start, []
    for _ in range(steps):
        if game.won(state):
            break
        known = game.actions(state)
        verb = rng.choice(sorted({text.partition(" ")[0] for text in known}))
        text = rng.choice([text for text in known if text.startswith(verb)])
        state, _ = game.act(state, known[text])
        actions.append(text)
    won = [] if game.won(state) else solution(dataclasses.replace(game, start=state), 99)
    return [*actions, "dance", "open cabinet 99", *won]


def varied_games() -> list[tuple[Game, dict[str, str]]]:
    """A game of each kind, with objects in objects."""
    found = []
    for kind in KINDS:
        environment = AlfWorldEnvironment(kinds=[kind], steps=(4, 16))
        for task in environment.tasks("train"):
            game = generated(task.data)
            cup = next((name for name in game.start.inside if game.house.has("isreceptacleobject", name)), None)
            spoon = next((name for name in game.start.inside if kind_of(name) in ("spoon", "pen")), None)
            if cup and spoon:
                found.append((game, {spoon: cup}))
                break
    return found


PLACES = [("cabinet 1", 1), ("cabinet 2", 1), ("countertop 1", 2), ("sinkbasin 1", 3), ("microwave 1", 4)]
PLACES += [("fridge 1", 5), ("desk 1", 6)]
FOOD = frozenset({"apple", "knife"})
SMALL = House(
    {name: Receptacle(f"loc {place}", name.startswith(("cabinet", "fridge", "microwave"))) for name, place in PLACES},
    {"countertop": FOOD, "fridge": FOOD, "cabinet": frozenset({"mug"}), "desk": frozenset({"mug"})},
    {
        **dict.fromkeys(("cleanable", "heatable", "coolable", "sliceable"), frozenset({"apple"})),
        "pickupable": frozenset({"apple", "knife", "mug"}),
        "toggleable": frozenset({"desklamp"}),
        "isreceptacleobject": frozenset({"mug"}),
    },
    {},
)


def small_game(wording: Wording) -> tuple[Game, list[str]]:
    """A game with two cabinets in one place, and actions that lead to the rare texts."""
    inside = {"apple 1": "countertop 1", "apple 2": "countertop 1", "knife 1": "countertop 1", "mug 1": "cabinet 1"}
    inside |= {"desklamp 1": "desk 1"}
    near = {name: [SMALL.receptacles[own].place] for name, own in inside.items()}
    start = State(MIDDLE, {name: [own] for name, own in inside.items()}, near)
    steps = """
        go to countertop 1|take knife 1 from countertop 1|slice apple 1 with knife 1|examine knife 1
        move knife 1 to countertop 1|take apple 1 from countertop 1|examine apple 1|go to sinkbasin 1
        clean apple 1 with sinkbasin 1|examine apple 1|go to microwave 1|heat apple 1 with microwave 1|examine apple 1
        go to fridge 1|cool apple 1 with fridge 1|examine apple 1|open fridge 1|move apple 1 to fridge 1|close fridge 1
        examine fridge 1|go to cabinet 2|look|open cabinet 1|open cabinet 2|take mug 1 from cabinet 1|look
        move mug 1 to cabinet 2|look|take mug 1 from cabinet 2|look|examine mug 1|go to desk 1|use desklamp 1
        use desklamp 1|look|move mug 1 to desk 1|go to countertop 1|take apple 2 from countertop 1|go to microwave 1
        heat apple 2 with microwave 1|examine apple 2|go to fridge 1|cool apple 2 with fridge 1|examine apple 2
        go to sinkbasin 1|clean apple 2 with sinkbasin 1|examine apple 2|inventory
    """
    actions = [own.strip() for line in steps.split("\n") for own in line.split("|") if own.strip()]
    moves = [own.split() for own in actions if own.startswith("move")]
    put = {" ".join(own): wording.move.format(o=" ".join(own[1:3]), r=" ".join(own[4:])) for own in moves}
    game = Game(SMALL, "cool", "apple", "fridge", "put a cool apple in fridge", start, wording)
    return game, [put.get(own, own) for own in actions]


def textworld_shows(games: Iterable[tuple[Mapping[str, Any], list[str]]], domain: str) -> list[Any]:
    """The observations, admissible actions and victories of TextWorld in games, first those of the beginning."""
    asked = [{"game": {**game, "pddl_domain": domain}, "actions": actions} for game, actions in games]
    program = Path(__file__).with_name("textworld_player.py")
    shown = subprocess.run(
        [os.environ.get(PLAYER, sys.executable), str(program)], input=json.dumps(asked), capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    return json.loads(shown.stdout.splitlines()[-1])
