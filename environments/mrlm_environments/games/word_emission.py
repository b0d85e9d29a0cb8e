"""Several agents simultaneously repeat one word: the smallest task that a team can learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mrlm_environments.data_tasks import ending
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import PositiveInt

JUDGED = 4096
"""Characters of a reply that are looked at."""


class WordEmission(Environment):
    """Every agent must say a given word and nothing else, as often as it likes.

    An agent's share is the fraction of its reply's characters, without whitespace, that belong to the word: see
    :func:`word_share`. All agents earn the mean of the shares, so 1 is reached when every reply is the word repeated.
    The episode is a success when all shares are 1.

    Args:
        num_agents: agents that speak, ``agent_1`` and so on.
        words: each task asks for one of them; upper and lower case differ. None is the letter ``a``.

    Raises:
        ConfigurationError: there is no agent or no word, or a word is empty or has whitespace.
    """

    name = "word_emission"
    client_settings = ("words",)
    quick = True
    forks = True

    def __init__(self, num_agents: PositiveInt = 2, words: list[str] | None = None) -> None:
        words = ["a"] if words is None else list(words)
        if not words or any(word.split() != [word] for word in words):
            raise ConfigurationError(f"word_emission: words is {words}; give at least one, each without whitespace")
        self.agents = tuple(f"agent_{number}" for number in range(1, num_agents + 1))
        self.words = words

    def tasks(self, split: str) -> TaskSource:
        """Return a numbered request for one of the words, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, self._request, lambda data: str(data["round"]))

    def gold(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Return the word for all agents."""
        return {agent: [task.data["word"]] for agent in self.agents}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards of copying the question and of saying the word alone; see :meth:`Environment.bounds`."""
        copied = word_share(self._question(task), task.data["word"])
        return len(self.agents) * copied, float(len(self.agents))

    def reset(self, task: Task) -> Observations:
        """Ask all agents; see :meth:`Environment.reset`."""
        self._word: str = task.data["word"]
        return {agent: (Message("user", self._question(task)),) for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pay all agents; see :meth:`Environment.step`."""
        shares = {agent: word_share(message.final_text, self._word) for agent, message in actions.items()}
        metrics = {f"{agent}_share": share for agent, share in shares.items()}
        success = all(share == 1 for share in shares.values())
        return ending(self.agents, {"word": sum(shares.values()) / len(shares)}, "answered", success, metrics)

    def _request(self, rng: Random) -> dict[str, Any]:
        return {"round": rng.randint(1, 9999), "word": rng.choice(self.words)}

    def _question(self, task: Task) -> str:
        return f"Round {task.data['round']}: say {task.data['word']}"


def word_share(reply: str, word: str) -> float:
    """Return the fraction of a reply's characters, without whitespace, in occurrences of the word.

    Occurrences are counted from the left and do not overlap; an empty reply has a share of 0. Only the first
    :data:`JUDGED` characters of a reply count.

    >>> word_share("on on", "on"), word_share("go on", "on"), word_share("onono", "on"), word_share(" ", "on")
    (1.0, 0.5, 0.8, 0.0)
    """
    text = "".join(reply[:JUDGED].split())
    return len(word) * text.count(word) / len(text) if text else 0.0
