"""Kuhn poker (Kuhn 1950): three cards, one bet, two players."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from mrlm_environments.games.letters import chosen_letter
from mrlm_environments.games.opponents import OpponentsGame
from mrlm_pl.environment import Message, Observations, SeededTasks, Step, Task, TaskSource

CARDS = ("J", "Q", "K")
"""The deck, lowest card first."""

_SHOWDOWNS = {"PP": 1.0, "BB": 2.0}
_FOLD = "BP"
"""The two actions that end a hand, those that compare the cards with the chips that the winner earns."""


class KuhnPoker(OpponentsGame):
    """Each player puts a chip into the pot and is dealt one of the cards J, Q and K; the higher card wins the pot.

    Players take turns to pass (P) or to bet a chip (B), by the first letter of the reply. After two passes and after
    two bets the cards are compared, and the winner earns 1 or 2 chips of the other. A pass after a bet folds, and so
    does a reply that is neither P nor B, bet or not: the other player wins one chip. A player that folds so before the
    other has had a turn loses its chip, but the other earns 0: agents earn nothing before their first decision.

    The game is zero-sum otherwise; with perfect play on both sides the player that begins loses 1/18 of a chip a hand.
    The task deals the cards and says which agent begins, so an agent, and with it a seat, is not bound to a position.
    """

    name = "kuhn_poker"

    def tasks(self, split: str) -> TaskSource:
        """Return numbered hands, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, _deal, lambda data: str(data["hand"]))

    def reset(self, task: Task) -> Observations:
        """Deal, and ask the agent that begins; see :meth:`Environment.reset`."""
        self._players = self._in_order(task)
        self._cards: dict[str, str] = dict(task.data["cards"])
        self._hand = task.data["hand"]
        self._history = ""
        return self._ask()

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pass, bet or fold; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        action = chosen_letter(message.final_text, "PB")
        self._history += action or ""
        if action is None:
            return self._end("illegal_action", self._other(agent), chips=1.0)
        last = self._history[-2:]
        if last == _FOLD:
            return self._end("fold", self._other(agent), chips=1.0)
        if last in _SHOWDOWNS:
            winner = max(self.agents, key=lambda player: CARDS.index(self._cards[player]))
            return self._end("showdown", winner, chips=_SHOWDOWNS[last])
        return Step(self._ask())

    def _ask(self) -> Observations:
        player = self._players[len(self._history) % 2]
        text = f"Card {self._cards[player]}, so far {self._history or 'nothing'}: P or B?"
        if len(self._history) < 2:
            text = f"Hand {self._hand}. {text}"
        return {player: (Message("user", text),)}

    def _end(self, reason: str, winner: str, chips: float) -> Step:
        metrics = {"illegal": float(reason == "illegal_action"), "chips": chips}
        return self._last_step(reason, winner, chips, len(self._history), metrics)


def _deal(rng: Random) -> dict[str, Any]:
    return {
        "hand": rng.randint(1, 9999),
        "cards": dict(zip(KuhnPoker.agents, rng.sample(CARDS, 2), strict=True)),
        "first": rng.choice(KuhnPoker.agents),
    }
