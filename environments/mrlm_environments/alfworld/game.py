"""A game in a house: its state, the admissible actions, their effects and texts. Texts read as in ALFWorld."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mrlm_environments.alfworld.house import House, kind_of, listed
from mrlm_pl.environment.tasks import Shared

Kind = Literal["pick", "look", "clean", "heat", "cool", "pick_two"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TREATMENTS = {
    "clean": ("sinkbasin", "cleanable", "isclean"),
    "heat": ("microwave", "heatable", "ishot"),
    "cool": ("fridge", "coolable", "iscool"),
}
"""Verbs, each with its kind of receptacle, the trait that it needs and its effect."""

KNIVES = ("knife", "butterknife")
MIDDLE = "loc 0"
MIDDLE_OF_ROOM = "You are in the middle of a room. Looking quickly around you, you see "
NOTHING = "Nothing happens."
Action = tuple[str, ...]
"""A verb and the names that it takes."""


@dataclass(frozen=True)
class Wording:
    """The texts that differ between versions of ALFWorld; the defaults are those of 0.4."""

    move: str = "move {o} to {r}"
    moved: str = "You move the {o} to the {r}."
    arrived: str = "You arrive at {r}."
    help: str | None = None


@dataclass(frozen=True)
class State(Shared):
    """The parts of a game that actions change. Copies share it, since nothing in it is changed in place.

    Args:
        place: place of the agent.
        inside: receptacles of each object; none for the held object.
        near: places of each object.
        held: object that the agent holds.
        opened: open receptacles.
        facts: facts such as ``("isclean", "apple 1")``.
        left: objects with receptacles that they were taken from, which ALFWorld lists on the floor as long as they
            stay at the place.
    """

    place: str
    inside: Mapping[str, Sequence[str]]
    near: Mapping[str, Sequence[str]]
    held: str | None = None
    opened: frozenset[str] = frozenset()
    facts: frozenset[tuple[str, str]] = frozenset()
    left: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class Game(Shared):
    """A house, a goal and the state at the beginning.

    Args:
        house: house that the agent is in.
        kind: kind of the goal.
        target: kind of the object.
        destination: kind of the receptacle that must hold the object, or of the lamp.
        instruction: goal in words.
        start: state at the beginning.
        wording: wording of some texts.
    """

    house: House
    kind: Kind
    target: str
    destination: str
    instruction: str
    start: State
    wording: Wording = Wording()

    def actions(self, state: State) -> dict[str, Action]:
        """Return the admissible actions by their texts, in alphabetical order."""
        house, held = self.house, state.held
        found: dict[str, Action] = {"look": ("look",), "inventory": ("inventory",)}
        if self.wording.help is not None:
            found["help"] = ("help",)
        for receptacle, own in house.receptacles.items():
            if own.place != state.place:
                found[f"go to {receptacle}"] = ("go", receptacle)
        for receptacle in house.at.get(state.place, ()):
            found[f"examine {receptacle}"] = ("view", receptacle)
            if house.receptacles[receptacle].openable:
                verb = "close" if receptacle in state.opened else "open"
                found[f"{verb} {receptacle}"] = (verb, receptacle)
            visible = self.visible(state, receptacle)
            for name in self.contents(state, receptacle):
                if visible and held is None and house.has("pickupable", name):
                    found[f"take {name} from {receptacle}"] = ("take", name, receptacle)
                if house.has("toggleable", name):
                    found[f"use {name}"] = ("use", name)
            if held is None:
                continue
            if visible and house.may_hold(receptacle, held):
                found[filled(self.wording.move, o=held, r=receptacle)] = ("move", held, receptacle)
            for verb, (kind, trait, _) in TREATMENTS.items():
                if kind == kind_of(receptacle) and house.has(trait, held):
                    found[f"{verb} {held} with {receptacle}"] = (verb, held, receptacle)
        if held is not None:
            found[f"examine {held}"] = ("examine", held)
            if kind_of(held) in KNIVES:
                for name, places in state.near.items():
                    if state.place in places and house.has("sliceable", name):
                        found[f"slice {name} with {held}"] = ("slice", name, held)
        return dict(sorted(found.items()))

    def act(self, state: State, action: Action) -> tuple[State, str]:
        """Return the state after an admissible action, and the text for the agent."""
        verb, *names = action
        if verb == "look":
            return state, self.look(state)
        if verb == "inventory":
            carried = f"You are carrying: a {state.held}." if state.held else "You are not carrying anything."
            return state, carried
        if verb == "help":
            return state, self.wording.help or ""
        first, last = names[0], names[-1]
        if verb == "view":
            return state, self.view(state, first)
        if verb == "examine":
            return state, self.examined(state, first)
        if verb == "go":
            place = self.house.receptacles[first].place
            state = replace(state, place=place)
            return state, f"{filled(self.wording.arrived, r=first, lend=place)} {self.view(state, first)}"
        if verb == "open":
            state = replace(state, opened=state.opened | {first})
            return state, f"You open the {first}. {self.view(state, first)}"
        if verb == "close":
            return replace(state, opened=state.opened - {first}), f"You close the {first}."
        if verb == "take":
            return self._take(state, first, last), f"You pick up the {first} from the {last}."
        if verb == "move":
            return self._put(state, first, last), filled(self.wording.moved, o=first, r=last)
        if verb == "use":
            return _with_fact(state, "istoggled", first), f"You turn on the {first}."
        if verb == "slice":
            return _with_fact(state, "issliced", first), f"You sliced the {first} with the {last}."
        _, _, fact = TREATMENTS[verb]
        opposite = {"ishot": "iscool", "iscool": "ishot"}.get(fact)
        state = _with_fact(replace(state, facts=state.facts - {(opposite, first)}), fact, first)
        return state, f"You {verb} the {first} using the {last}."

    def won(self, state: State) -> bool:
        """Return whether the goal is reached."""
        if self.kind == "look":
            if state.held is None or kind_of(state.held) != self.target:
                return False
            lamps = (name for fact, name in state.facts if fact == "istoggled" and kind_of(name) == self.destination)
            return any(self.house.receptacles[own].place == state.place for lamp in lamps for own in state.inside[lamp])
        places = [own for name, inside in state.inside.items() if self.treated(state, name) for own in inside]
        counts = Counter(own for own in places if kind_of(own) == self.destination)
        return max(counts.values(), default=0) >= (2 if self.kind == "pick_two" else 1)

    def treated(self, state: State, name: str) -> bool:
        """Return whether an object is of the goal's kind and clean, hot or cool as it asks."""
        treatment = TREATMENTS.get(self.kind)
        return kind_of(name) == self.target and (treatment is None or (treatment[2], name) in state.facts)

    def contents(self, state: State, receptacle: str) -> list[str]:
        """Return the objects in or on a receptacle, in ALFWorld's order."""
        return listed(name for name, places in state.inside.items() if receptacle in places)

    def visible(self, state: State, receptacle: str) -> bool:
        """Return whether a receptacle is open or needs no opening."""
        return receptacle in state.opened or not self.house.receptacles[receptacle].openable

    def opening(self) -> str:
        """Return the text at the beginning: the receptacles of the house and the goal."""
        seen = _series(listed(self.house.receptacles))
        return f"{MIDDLE_OF_ROOM}{seen}.\n\nYour task is to: {self.instruction}."

    def look(self, state: State) -> str:
        """Return the text of ``look``: the receptacles of the agent's place and objects on the floor."""
        here = self.house.at.get(state.place)
        if here is None:
            return f"{MIDDLE_OF_ROOM}nothing."  # as in ALFWorld, which lists the receptacles only at the beginning
        near = listed(name for name, places in state.near.items() if state.place in places)
        floor = [name for name in near for receptacle in here if (name, receptacle) in state.left]
        return f"You are facing the {_join_names(here)}. Next to it, you see {_series(floor)}."

    def view(self, state: State, receptacle: str) -> str:
        """Return the text of ``examine`` for a receptacle."""
        if not self.visible(state, receptacle):
            return f"The {receptacle} is closed."
        contents = _series(self.contents(state, receptacle))
        if self.house.receptacles[receptacle].openable:
            return f"The {receptacle} is open. In it, you see {contents}."
        return f"On the {receptacle}, you see {contents}."

    def examined(self, state: State, name: str) -> str:
        """Return the text of ``examine`` for an object."""
        if self.house.has("isreceptacleobject", name):
            return f"This is a normal {name}. In it, you see {_series(self.house.contents.get(name, ()))}."
        facts = {fact for fact, own in state.facts if own == name}
        clean, sliced = "isclean" in facts, "issliced" in facts
        warmth = "hot" if "ishot" in facts else ("cool" if clean or sliced else "cold") if "iscool" in facts else ""
        words = [" and ".join(filter(None, (warmth, "clean" * clean))), "sliced" * sliced]
        if any(words):
            return f"This is a {' '.join(filter(None, words))} {name}."
        return f"This {name} is on." if "istoggled" in facts else f"There's nothing special about {name}."

    def _take(self, state: State, name: str, receptacle: str) -> State:
        inside = {**state.inside, name: [own for own in state.inside[name] if own != receptacle]}
        near = {**state.near, name: [own for own in state.near[name] if own != state.place]}
        return replace(state, inside=inside, near=near, held=name, left=state.left | {(name, receptacle)})

    def _put(self, state: State, name: str, receptacle: str) -> State:
        inside = {**state.inside, name: [*state.inside[name], receptacle]}
        near = {**state.near, name: [*state.near[name], state.place]}
        return replace(state, inside=inside, near=near, held=None, left=state.left - {(name, receptacle)})


def filled(text: str, **names: str) -> str:
    """Return a text with names instead of ``{o}`` and others; a file's text may hold anything else.

    >>> filled("put {o} in/on {r}", o="cup 1", r="shelf 2")
    'put cup 1 in/on shelf 2'
    """
    for key, name in names.items():
        text = text.replace(f"{{{key}}}", name)
    return text


def _with_fact(state: State, fact: str, name: str) -> State:
    return replace(state, facts=state.facts | {(fact, name)})


def _join_names(names: Sequence[str]) -> str:
    """Return ``a``, ``a, and b`` or ``a, b, and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _series(names: Iterable[str]) -> str:
    """Return names with articles, or ``nothing``."""
    articled = [f"a {name}" for name in names]
    return _join_names(articled) if articled else "nothing"
