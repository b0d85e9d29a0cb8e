"""A discussion for tests: agents answer simultaneously, turn after turn, scored by the digits in their replies."""

from __future__ import annotations

from collections.abc import Mapping

from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Message, Task, base_agent

PERSONS = ("ann", "bob")


class Discussion(Environment):
    """Ask Ann and Bob for digits ``turns`` times and show each the other's last reply.

    A score is the fraction of digits in a reply. A reply without digits costs another 0.5, and equal replies end the
    discussion early.

    Args:
        turns: number of turns.
        by_turn: use one agent ``NAME@K`` per turn, in its own conversation.
        labels: score 1 for a reply of digits only, else 0.
    """

    name = "discussion"

    def __init__(self, turns: int = 3, by_turn: bool = False, labels: bool = False) -> None:
        self.turns, self.by_turn, self.labels = turns, by_turn, labels
        self.agents = tuple(
            self._agent(person, turn) for person in PERSONS for turn in range(1, turns + 1 if by_turn else 2)
        )

    def _agent(self, person: str, turn: int) -> str:
        return f"{person}@{turn}" if self.by_turn else person

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        self.turn, self.question = 1, f"Say {task.data['n']}"
        return {self._agent(person, 1): [Message("user", self.question)] for person in PERSONS}

    def step(self, actions: Mapping[str, Message]) -> Step:
        said = {base_agent(agent): message.content for agent, message in actions.items()}
        components = {agent: self._components(message.content) for agent, message in actions.items()}
        rewards = {agent: sum(parts.values()) for agent, parts in components.items()}
        self.turn += 1
        agreed = len(set(said.values())) == 1
        if agreed or self.turn > self.turns:
            return Step(rewards=rewards, components=components, done=True, stop_reason="agreed" if agreed else "turns")
        observations = {}
        for person in PERSONS:
            heard = " ".join(said[other] for other in PERSONS if other != person)
            first = f"{self.question}\n" if self.by_turn else ""
            observations[self._agent(person, self.turn)] = [Message("user", f"{first}Heard {heard}")]
        return Step(observations, rewards, components)

    def _components(self, text: str) -> dict[str, float]:
        share = sum(map(str.isdigit, text)) / max(len(text), 1)
        parts = {"score": float(share == 1) if self.labels else share}
        return parts if share else {**parts, "penalty": -0.5}
