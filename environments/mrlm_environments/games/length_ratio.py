"""A repeated game of two writers: the ratio of their texts' lengths must be in a band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any

from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import PositiveInt, between

MAX_CHARACTERS = 10_000
"""The largest length that a text counts for."""

_KINDS = ("warm", "cold", "old", "quiet", "bright", "small", "grey", "wild", "slow", "late")
_THINGS = ("rain", "sea", "town", "garden", "train", "night", "river", "house", "storm", "road")


class LengthRatioGame(Environment):
    """Two writers write simultaneously, for some rounds; both earn the same in each round.

    A round earns 1 where the second text's characters over the first's are in the target band. Below it the reward
    falls linearly to 0 at a ratio of 0, above it to 0 at twice the band's upper end. Two texts are needed: one with
    fewer than ``minimum`` characters, whitespace around it not counted, makes the round earn 0. After a round both
    learn both lengths. An easier relative of CoMLRL's writing tasks (arXiv 2508.04652).

    Args:
        target: lowest and highest ratio that earn 1.
        rounds: number of rounds, in each of which both write.
        minimum: minimum number of characters of a text.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "length_ratio"
    client_settings = ("target", "rounds", "minimum")
    agents = ("first", "second")
    quick = True
    forks = True

    def __init__(
        self,
        target: tuple[float, float] = (2.0, 3.0),
        rounds: PositiveInt = 2,
        minimum: Annotated[int, between(1, MAX_CHARACTERS)] = 4,
    ) -> None:
        band = tuple(target)
        if len(band) != 2 or not 0 < band[0] <= band[1] < math.inf:
            raise ConfigurationError(f"length_ratio: target is {target!r}; give [lowest, highest], both above 0")
        self.target, self.rounds, self.minimum = (band[0], band[1]), rounds, minimum

    def tasks(self, split: str) -> TaskSource:
        """Return topics, each with a number, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, _topic, lambda data: data["topic"])

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the topic's letters, as often as needed; None where no two lengths have a ratio in the band."""
        lengths = self._lengths()
        if lengths is None:
            return None
        letters = task.data["topic"].replace(" ", "")
        texts = [(letters * (length // len(letters) + 1))[:length] for length in lengths]
        return {agent: [text] for agent, text in zip(self.agents, texts, strict=True)}

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the returns of texts of equal length and of lengths in the band; see :meth:`Environment.bounds`."""
        if self._lengths() is None:
            return None
        most = len(self.agents) * self.rounds
        return most * ratio_pay(1, 1, self.target), float(most)

    def reset(self, task: Task) -> Observations:
        """Give both the topic; see :meth:`Environment.reset`."""
        self._round = 0
        return {
            agent: (Message("user", f"You are the {agent} writer. Topic: {task.data['topic']}."),)
            for agent in self.agents
        }

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pay a round; see :meth:`Environment.step`."""
        self._round += 1
        first, second = (len(actions[agent].final_text[:MAX_CHARACTERS].strip()) for agent in self.agents)
        pay = ratio_pay(first, second, self.target) if min(first, second) >= self.minimum else 0.0
        done = self._round == self.rounds
        shown = Message("user", f"The first text had {first} characters, the second {second}. Write again.")
        return Step(
            observations={} if done else dict.fromkeys(self.agents, (shown,)),
            components={agent: {"ratio": pay} for agent in self.agents},
            done=done,
            stop_reason="rounds" if done else "",
            success=pay == 1.0 if done else None,
            metrics={"first_characters": float(first), "second_characters": float(second)},
        )

    def _lengths(self) -> tuple[int, int] | None:
        low, high = self.target
        for first in range(self.minimum, MAX_CHARACTERS + 1):
            second = max(self.minimum, math.ceil(low * first))
            if second <= MAX_CHARACTERS and second <= high * first:
                return first, second
        return None


def ratio_pay(first: int, second: int, target: tuple[float, float]) -> float:
    """Return the reward of two lengths, from 0 to 1.

    >>> [ratio_pay(10, second, (2.0, 3.0)) for second in (0, 10, 20, 30, 45, 60, 90)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    low, high = target
    ratio = second / first
    if ratio < low:
        return ratio / low
    return 1.0 if ratio <= high else max(0.0, 2.0 - ratio / high)


def _topic(rng: Random) -> dict[str, Any]:
    return {"topic": f"{rng.choice(_KINDS)} {rng.choice(_THINGS)} {rng.randint(1, 99)}"}
