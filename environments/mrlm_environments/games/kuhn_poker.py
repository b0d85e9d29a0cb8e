"""Kuhn poker (Kuhn 1950): three cards, one bet, two players."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from mrlm_environments.games.letters import chosen_letter
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource

CARDS = ("J", "Q", "K")
"""The deck, lowest card first."""

_SHOWDOWNS = {"PP": 1, "BB": 2, "PBB": 2}
_FOLDS = ("BP", "PBP")


class KuhnPoker(Environment):
    """Each player puts a chip into the pot and is dealt one of the cards J, Q and K; the higher card wins the pot.

    Players take turns to pass (P) or to bet a chip (B), by the first letter of the reply. After two passes and after
    two bets the cards are compared, and the winner earns 1 or 2 chips of the other. A pass after a bet folds, and so
    does a reply that is neither P nor B, bet or not: the other player wins one chip. A player that folds so before the
    other has had a turn loses its chip, but the other earns 0: agents earn nothing before their first decision.

    The game is zero-sum otherwise; with perfect play on both sides the player that begins loses 1/18 of a chip a hand.
    The task deals the cards and says which agent begins, so an agent, and with it a seat, is not bound to a position.
    """

    name = "kuhn_poker"
    agents = ("alpha", "beta")
    quick = True
    forks = True

    def tasks(self, split: str) -> TaskSource:
        """Return numbered hands, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, _deal, lambda data: str(data["hand"]))

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the sum of a game of opponents; see :meth:`Environment.bounds`."""
        return 0.0, 0.0

    def reset(self, task: Task) -> Observations:
        """Deal, and ask the agent that begins; see :meth:`Environment.reset`."""
        first = task.data["first"]
        self._players = (first, self._other(first))
        self._cards: dict[str, str] = dict(task.data["cards"])
        self._hand = task.data["hand"]
        self._history = ""
        return self._ask()

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pass, bet or fold; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        action = chosen_letter(message.content, "PB")
        self._history += action or ""
        if action is None:
            return self._end("illegal_action", self._other(agent), chips=1)
        if self._history in _FOLDS:
            return self._end("fold", self._other(agent), chips=1)
        if self._history in _SHOWDOWNS:
            winner = max(self.agents, key=lambda player: CARDS.index(self._cards[player]))
            return self._end("showdown", winner, chips=_SHOWDOWNS[self._history])
        return Step(self._ask())

    def _other(self, agent: str) -> str:
        return self.agents[1 - self.agents.index(agent)]

    def _ask(self) -> Observations:
        player = self._players[len(self._history) % 2]
        text = f"Card {self._cards[player]}, so far {self._history or 'nothing'}: P or B?"
        if len(self._history) < 2:
            text = f"Hand {self._hand}. {text}"
        return {player: (Message("user", text),)}

    def _end(self, reason: str, winner: str, chips: int) -> Step:
        rewards = {winner: float(chips), self._other(winner): -float(chips)}
        if not self._history:  # the one that begins has folded before the other had a turn
            rewards[self._players[1]] = 0.0
        return Step(
            rewards=rewards,
            done=True,
            stop_reason=reason,
            metrics={
                **{f"{agent}_won": float(agent == winner) for agent in self.agents},
                "illegal": float(reason == "illegal_action"),
                "chips": float(chips),
            },
        )


def _deal(rng: Random) -> dict[str, Any]:
    return {
        "hand": rng.randint(1, 9999),
        "cards": dict(zip(KuhnPoker.agents, rng.sample(CARDS, 2), strict=True)),
        "first": rng.choice(KuhnPoker.agents),
    }
