"""TextArena's games, with separate random numbers for each episode."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from mrlm_environments.libraries import asked_for, library
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError, did_you_mean
from mrlm_pl.settings import PositiveInt

_DOWNLOADS = re.compile(r"nltk\.download|EnglishDictionary")
"""Matches the source of games that download word lists when they are imported or created."""

READ = 2000
"""Characters of a reply that a game reads; Python reads no numbers of more than 4300 digits."""

_EPISODE: ContextVar[random.Random | None] = ContextVar("_EPISODE", default=None)


class _Draws:
    """Replaces the module ``random`` in TextArena's modules by the generator of the running episode."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_EPISODE.get() or random, name, None) or getattr(random, name)


class Line(NamedTuple):
    """A message that a player sees: its sender (``GAME`` or a player), its kind in TextArena and its text."""

    sender: str
    kind: str
    text: str


class TextArenaCodec:
    """Messages and replies of TextArena as text; override a method to change them."""

    def observation(self, lines: Sequence[Line]) -> str:
        """Return the messages since the player's last move as text, of several boards only the last."""
        boards = [number for number, line in enumerate(lines) if line.kind == "GAME_BOARD"]
        shown = [line for number, line in enumerate(lines) if number not in boards[:-1]]
        return "\n".join(line.text if line.sender == "GAME" else f"[{line.sender}] {line.text}" for line in shown)

    def action(self, reply: str) -> str:
        """Return the move of a reply: its last :data:`READ` characters, in brackets if they have none."""
        said = reply[-READ:].strip()
        return said if "[" in said else f"[{said}]"


class TextArenaEnvironment(Environment):
    """A game of TextArena, such as ``Nim-v0``; needs the extra ``textarena``.

    Players see the game's prompt, then the messages since their last move. The game judges illegal moves: most games
    allow one more attempt and then give -1 to the player and 1 to the other. The metric ``illegal`` counts
    rejected moves. Rewards come at the end; a player without a move earns none. A game's turn limit is one of its
    rules, so no episode is ``truncated``.

    Each task is a seed and the agent that is player 0, so a seat is not bound to a position. An episode draws from its
    own generator, which replaces the module ``random`` in TextArena's modules.

    Args:
        id: game id as for ``textarena.make``, without the suffix of a wrapper.
        settings: arguments of the game, such as ``{piles: [1, 2]}``.
        players: number of players; one is named agent, two are alpha and beta, more are agent_1 and so on.
        codec: messages and replies as text.
        downloads: allow a game that downloads word lists.

    Raises:
        ConfigurationError: TextArena is not installed, does not know the game, its settings or this number of players,
            or the game downloads data.
    """

    name = "textarena"
    forks = True

    def __init__(
        self,
        id: str,
        settings: dict[str, Any] | None = None,
        players: PositiveInt = 2,
        codec: TextArenaCodec | None = None,
        downloads: bool = False,
    ) -> None:
        self.id, self.settings, self.downloads = id, dict(settings or {}), downloads
        self.codec = codec or TextArenaCodec()
        named = {1: ("agent",), 2: ("alpha", "beta")}
        self.agents = named.get(players) or tuple(f"agent_{number}" for number in range(1, players + 1))
        asked = asked_for(f"textarena: {id!r} with settings {self.settings} and {players} players")
        with asked, _drawing_from(random.Random(0)):
            (game := self._make()).reset(num_players=players, seed=0)
            if (own := game.state.num_players) != players:
                raise ConfigurationError(f"textarena: {id!r} has {own} players; set players, now {players}, to {own}")

    def tasks(self, split: str) -> TaskSource:
        """Return endless seeds, each with the agent that is player 0; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, self._task, lambda data: str(data["seed"]))

    def reset(self, task: Task) -> Observations:
        """Begin a game; see :meth:`Environment.reset`."""
        first = self.agents.index(task.data["first"])
        self._players = (*self.agents[first:], *self.agents[:first])
        self._moved: set[str] = set()
        self._counts = {"illegal": 0.0, "illegal_of": 0.0}
        self._draws = random.Random(task.data["seed"])
        with _drawing_from(self._draws):
            self._game = self._make()
            self._game.reset(num_players=len(self.agents), seed=task.data["seed"])
            return self._observations()

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Make a move; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        self._moved.add(agent)
        with _drawing_from(self._draws):
            facts = self._game.state.game_info[self._players.index(agent)]
            facts["invalid_move"] = False  # games that continue after an illegal move leave it True
            done, _ = self._game.step(action=self.codec.action(message.final_text))
            state, lost = self._game.state, facts["invalid_move"]
            self._counts["illegal"] += lost or getattr(state, "error_count", 0) > 0
            self._counts["illegal_of"] += 1
            if not done:
                return Step(self._observations(), metrics=dict(self._counts))
            earned, _ = self._game.close()
        # Four games of 0.7.4 swap reward and reason of an illegal move.
        earned = {number: -1.0 if isinstance(reward, str) else reward for number, reward in (earned or {}).items()}
        rewards = {player: float(earned.get(number, 0.0)) for number, player in enumerate(self._players)}
        return Step(
            rewards={player: reward for player, reward in rewards.items() if player in self._moved},
            done=True,
            stop_reason="illegal_move" if lost else "finished",
            metrics={**self._counts, **{f"{player}_won": float(reward > 0) for player, reward in rewards.items()}},
        )

    def _task(self, rng: random.Random) -> dict[str, Any]:
        return {"seed": rng.randrange(1 << 31), "first": rng.choice(self.agents)}

    def _observations(self) -> Observations:
        player, messages = self._game.get_observation()
        roles = self._game.state.role_mapping
        lines = [
            Line(str(roles.get(sender, f"Player {sender}")), kind.name, text)
            for sender, text, kind in messages
            # The player's own reply; three games of 0.7.4 swap its fields, so that the text is a number.
            if isinstance(text, str) and not (kind.name == "PLAYER_ACTION" and sender == player)
        ]
        return {self._players[player]: (Message("user", self.codec.observation(lines)),)}

    def _make(self) -> Any:
        """Return a new game without wrappers, whose modules draw from the running episode's generator."""
        arena = library("textarena", "textarena")
        games = arena.envs.registration.ENV_REGISTRY
        if self.id not in games:
            known = did_you_mean(self.id, games, f"TextArena {arena.__version__} has {len(games)} games")
            raise ConfigurationError(f"textarena: there is no game {self.id!r}; {known}")
        entry = games[self.id].entry_point
        if isinstance(entry, str):
            module = entry.partition(":")[0]
            found = importlib.util.find_spec(module)
            source = Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
            if not self.downloads and _DOWNLOADS.search(source):
                raise ConfigurationError(
                    f"textarena: {self.id!r} downloads word lists; set `downloads: true` to allow it"
                )
            importlib.import_module(module)
        for name, loaded in list(sys.modules.items()):
            if name.startswith("textarena.") and vars(loaded).get("random") is random:
                loaded.random = _Draws()  # type: ignore[attr-defined]
        if (state := arena.FFAMultiPlayerState).step.__module__ != __name__:
            state.step = _ending(state.step)
        game = arena.make(self.id, **self.settings)
        while isinstance(game, arena.Wrapper):
            game = game.env
        return game


def _ending(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return TextArena's ``step`` of a state, which alone never returns once all players are out."""

    def ended(state: Any, rotate_player: bool = True) -> Any:
        if not state.done and len(set(state.elimination_order)) == state.num_players:
            state.set_winners([], "All players are eliminated.")
        return step(state, rotate_player)

    return ended


@contextmanager
def _drawing_from(generator: random.Random) -> Iterator[None]:
    """Let TextArena draw from a generator, in this thread."""
    token = _EPISODE.set(generator)
    try:
        yield
    finally:
        _EPISODE.reset(token)
