"""A scripted expert: it searches the receptacles that may hold the object and remembers what it has seen."""

from __future__ import annotations

from collections.abc import Generator

from mrlm_environments.alfworld.game import TREATMENTS, Game, filled
from mrlm_environments.alfworld.house import kind_of, listed

Actions = Generator[str, None, None]


def solution(game: Game, limit: int) -> list[str]:
    """Return actions that win the game, by their texts; empty where the expert needs more than ``limit``."""
    expert = _Expert(game)
    actions: list[str] = []
    for text in expert.play():
        action = game.actions(expert.state).get(text)
        if action is None or len(actions) == limit:
            return []
        expert.state, _ = game.act(expert.state, action)
        actions.append(text)
    return actions if game.won(expert.state) else []


class _Expert:
    """A player of one game. It uses only those contents of receptacles that it has seen."""

    def __init__(self, game: Game) -> None:
        self.game, self.state = game, game.start
        self.seen: set[str] = set()
        receptacles = listed(game.house.receptacles)
        self.destination = next((name for name in receptacles if kind_of(name) == game.destination), "")

    def play(self) -> Actions:
        """Yield actions; ``state`` is that after the latest one whenever the next is asked for."""
        game = self.game
        while not game.won(self.state):
            name, receptacle = yield from self.find(game.target)
            yield f"take {name} from {receptacle}"
            if game.kind == "look":
                lamp, _ = yield from self.find(game.destination)
                yield f"use {lamp}"
                continue
            if not game.treated(self.state, name):
                kind = TREATMENTS[game.kind][0]
                helper = next((own for own in game.house.receptacles if kind_of(own) == kind), "")
                yield from self.go(helper)
                yield f"{game.kind} {name} with {helper}"
            yield from self.go(self.destination)
            yield from self.open(self.destination)
            yield filled(game.wording.move, o=name, r=self.destination)

    def find(self, kind: str) -> Generator[str, None, tuple[str, str]]:
        """Go where an object of a kind is, and return its name and its receptacle; empty texts if there is none.

        Receptacles known to hold one come first, then those that need no opening.
        """
        house = self.game.house
        likely = [own for own in listed(house.receptacles) if house.may_hold(own, kind)] or listed(house.receptacles)
        for receptacle in sorted(likely, key=lambda own: (own not in self.seen, house.receptacles[own].openable)):
            if receptacle in self.seen and not self.wanted(receptacle, kind):
                continue
            yield from self.go(receptacle)
            yield from self.open(receptacle)
            self.seen.add(receptacle)
            if found := self.wanted(receptacle, kind):
                return found[0], receptacle
        return "", ""

    def wanted(self, receptacle: str, kind: str) -> list[str]:
        """Return the objects of a kind in a receptacle, but those that are where the goal asks for them."""
        if self.game.kind == "pick_two" and receptacle == self.destination:
            return []
        return [name for name in self.game.contents(self.state, receptacle) if kind_of(name) == kind]

    def go(self, receptacle: str) -> Actions:
        """Go to a receptacle unless the agent is there."""
        if receptacle and self.game.house.receptacles[receptacle].place != self.state.place:
            yield f"go to {receptacle}"

    def open(self, receptacle: str) -> Actions:
        """Open a receptacle unless it is open."""
        if receptacle and not self.game.visible(self.state, receptacle):
            yield f"open {receptacle}"
