"""Zero-sum games of two players who take turns."""

from __future__ import annotations

from collections.abc import Mapping

from mrlm_pl.environment import Environment, Step, Task


class OpponentsGame(Environment):
    """Base class of zero-sum games for two players; the task's ``first`` names the one that begins."""

    agents = ("alpha", "beta")
    quick = True
    forks = True

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the sum of a game of opponents; see :meth:`Environment.bounds`."""
        return 0.0, 0.0

    def _in_order(self, task: Task) -> tuple[str, str]:
        """Return the agents, the one that begins first."""
        return (task.data["first"], self._other(task.data["first"]))

    def _other(self, agent: str) -> str:
        return self.agents[1 - self.agents.index(agent)]

    def _last_step(
        self, reason: str, winner: str | None, stake: float, moves: int, metrics: Mapping[str, float]
    ) -> Step:
        """Return the last step. The winner earns 0 if it has had no turn: agents earn nothing before their first."""
        rewards = dict.fromkeys(self.agents, 0.0)
        if winner is not None:
            rewards = {winner: stake if moves else 0.0, self._other(winner): -stake}
        won = {f"{agent}_won": float(agent == winner) for agent in self.agents}
        return Step(rewards=rewards, done=True, stop_reason=reason, metrics={**won, **metrics})
