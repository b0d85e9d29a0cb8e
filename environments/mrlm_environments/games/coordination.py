"""A two-player coordination game: collaborating is best together and worst alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mrlm_environments.games.letters import chosen_letter
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError

COLLABORATE, ALONE = "C", "A"
_NOUNS = ("game", "round", "match", "turn", "deal", "hand")


class CoordinationGame(Environment):
    """Both players choose simultaneously: C (collaborate) or A (alone).

    Each earns 1 if both choose C; A earns 0.4 whatever the other does; a lone C earns 0. The choice is the first letter
    of the reply, upper or lower case; a reply without one of the two letters earns 0 and counts as an A for the other
    player.

    Args:
        together: reward of each player when both collaborate.
        alone: reward of a player who acts alone.
        deserted: reward of a player who collaborates alone.

    Raises:
        ConfigurationError: the rewards do not make a coordination game (together > alone > deserted).
    """

    name = "coordination"
    client_settings = ("together", "alone", "deserted")
    agents = ("row", "column")
    quick = True
    forks = True

    def __init__(self, together: float = 1.0, alone: float = 0.4, deserted: float = 0.0) -> None:
        if not together > alone > deserted:
            raise ConfigurationError(
                f"coordination: together {together}, alone {alone}, deserted {deserted}; "
                "a coordination game has together > alone > deserted"
            )
        self.together, self.alone, self.deserted = together, alone, deserted

    def tasks(self, split: str) -> TaskSource:
        """Return wordings of the question, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, _wording, lambda data: data["question"])

    def gold(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Return collaboration for both."""
        return {agent: [COLLABORATE] for agent in self.agents}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards of acting alone and together; see :meth:`Environment.bounds`."""
        return 2 * self.alone, 2 * self.together

    def reset(self, task: Task) -> Observations:
        """Ask both players; see :meth:`Environment.reset`."""
        return {agent: (Message("user", task.data["question"]),) for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pay both players; see :meth:`Environment.step`."""
        choices = {agent: chosen_letter(message.final_text, COLLABORATE + ALONE) for agent, message in actions.items()}
        together = all(chosen == COLLABORATE for chosen in choices.values())
        pay = {COLLABORATE: self.together if together else self.deserted, ALONE: self.alone, None: 0.0}
        return Step(
            rewards={agent: pay[chosen] for agent, chosen in choices.items()},
            done=True,
            stop_reason="answered",
            success=together,
            metrics={
                **{f"{agent}_collaborates": float(chosen == COLLABORATE) for agent, chosen in choices.items()},
                "parsed": sum(chosen is not None for chosen in choices.values()) / len(choices),
            },
        )


def _wording(rng: Random) -> dict[str, Any]:
    return {"question": f"{rng.choice(_NOUNS).capitalize()} {rng.randint(1, 99)}: C or A?"}
