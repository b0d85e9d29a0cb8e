"""A game in PettingZoo's form whose agents leave one by one."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Discrete
from pettingzoo import ParallelEnv
from pettingzoo.utils import parallel_to_aec


class parallel_env(ParallelEnv[str, int, int]):  # noqa: N801 - as the library names it
    """Agents stay (0) or leave (1); leaving in round n earns n, staying 0.5. It ends after 3 rounds."""

    metadata = {"name": "leaving_agents"}  # noqa: RUF012 - as the library has it
    render_mode = None
    possible_agents = ["a", "b", "c"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Discrete:
        return Discrete(4)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.round = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.round += 1
        present, self.agents = self.agents, [agent for agent in self.agents if not actions[agent]]
        rewards = {agent: float(self.round) if actions[agent] else 0.5 for agent in present}
        left = {agent: bool(actions[agent]) for agent in present}
        late = {agent: self.round == 3 and not actions[agent] for agent in present}
        if self.round == 3:
            self.agents = []
        return dict.fromkeys(present, self.round), rewards, left, late, {agent: {} for agent in present}


def env() -> Any:
    """Return the same game in turns."""
    return parallel_to_aec(parallel_env())
