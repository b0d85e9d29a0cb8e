"""A two-player anti-coordination game: each must say another half of a word."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError

_NOT_A_LETTER = re.compile(r"[^a-z]+")


class Halves(Environment):
    """Both players simultaneously choose one half of the word; different halves earn 1 each, anything else 0.

    Either player may take either half, so the game has two solutions and nothing in it says which: what one player's
    choice is worth depends on the other's alone. Both players see the same text. Players with the same policy choose
    independently and equally, so they earn at most 0.5 on average; two policies can learn to differ and earn 1.

    A player chooses the half that the letters of its reply begin with, in upper or lower case.

    Args:
        word: an even number of letters from a to z whose halves differ.

    Raises:
        ConfigurationError: the word is none like that.
    """

    name = "halves"
    client_settings = ("word",)
    agents = ("left", "right")
    quick = True
    forks = True

    def __init__(self, word: str = "ac") -> None:
        middle = len(word) // 2
        self.halves = (word[:middle].lower(), word[middle:].lower())
        if len(word) % 2 or _NOT_A_LETTER.search(word.lower()) or len(set(self.halves)) < 2:
            raise ConfigurationError(
                f"halves: word is {word!r}; it must have an even number of letters from a to z, and different halves"
            )
        self.word = word

    def tasks(self, split: str) -> TaskSource:
        """Return numbered rounds, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, self._round, lambda data: data["question"])

    def gold(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Return one of the two solutions."""
        return {agent: [half] for agent, half in zip(self.agents, self.halves, strict=True)}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards of equal and of different halves; see :meth:`Environment.bounds`."""
        return 0.0, 2.0

    def reset(self, task: Task) -> Observations:
        """Ask both players; see :meth:`Environment.reset`."""
        return {agent: (Message("user", task.data["question"]),) for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pay both players; see :meth:`Environment.step`."""
        chosen = {agent: self.chosen(message.final_text) for agent, message in actions.items()}
        whole = set(chosen.values()) == set(self.halves)
        return Step(
            rewards=dict.fromkeys(self.agents, float(whole)),
            done=True,
            stop_reason="answered",
            success=whole,
            metrics={
                **{f"{agent}_first_half": float(half == self.halves[0]) for agent, half in chosen.items()},
                "parsed": sum(half is not None for half in chosen.values()) / len(chosen),
            },
        )

    def chosen(self, reply: str) -> str | None:
        """Return the half that the letters of a reply begin with, or None.

        >>> game = Halves("sunset")
        >>> game.chosen("Set!"), game.chosen("s-u-n"), game.chosen("the sun")
        ('set', 'sun', None)
        """
        letters = _NOT_A_LETTER.sub("", reply[:1000].lower())
        return next((half for half in self.halves if letters.startswith(half)), None)

    def _round(self, rng: Random) -> dict[str, Any]:
        return {"question": f"Round {rng.randint(1, 9999)}: {self.halves[0]} or {self.halves[1]}?"}
