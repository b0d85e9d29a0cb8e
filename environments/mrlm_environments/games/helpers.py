"""A planner that may ask helpers, none to several times, before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any

from mrlm_environments.data_tasks import ending
from mrlm_environments.games.letters import chosen_letter
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.settings import NonNegativeFloat, between


class Helpers(Environment):
    """The planner must say a letter, A or C, that it does not see; each helper that it asks does.

    The planner asks a helper with C as often as it likes, and ends its questions with A; it then says the letter. A
    helper says a letter, which the planner is shown. The planner earns 1 for the right letter, minus ``cost`` for each
    helper; a helper earns ``score`` for the right letter. The first letter of a reply counts. Every call has its own
    agent, ``helper@1``, ``helper@2``, ..., with its own conversation, so the number of helpers that act differs between
    episodes. After the last helper, and after any other reply than C, the planner is not asked again whether it wants
    help.

    Args:
        calls: maximum number of helpers that may be asked.
        cost: cost of asking one helper.
        score: a helper's reward for the right letter.

    Raises:
        ConfigurationError: a value is out of range.
    """

    name = "helpers"
    client_settings = ("calls", "cost", "score")
    quick = True
    forks = True

    def __init__(
        self, calls: Annotated[int, between(1, 100)] = 3, cost: NonNegativeFloat = 0.05, score: NonNegativeFloat = 0.5
    ) -> None:
        self.cost, self.score = cost, score
        self.agents = ("planner", *(f"helper@{number}" for number in range(1, calls + 1)))

    def tasks(self, split: str) -> TaskSource:
        """Return numbered rounds, without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, _round, lambda data: str(data["round"]))

    def gold(self, task: Task) -> Mapping[str, Sequence[str]]:
        """Return the right letter of everybody, after as many questions as the team earns by."""
        letter, helpers = task.data["letter"], self.agents[1:]
        if self.score <= self.cost:
            return {"planner": ["A", letter]}
        return {"planner": [*("C" for _ in helpers), letter], **dict.fromkeys(helpers, (letter,))}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards of a guess and of right letters by everybody; see :meth:`Environment.bounds`."""
        return 0.5, 1.0 + max(0.0, self.score - self.cost) * (len(self.agents) - 1)

    def reset(self, task: Task) -> Observations:
        """Ask the planner whether it wants help; see :meth:`Environment.reset`."""
        self._round, self._letter, self._asked, self._answers = task.data["round"], task.data["letter"], 0, False
        return self._shown("planner", f"Round {self._round}: C or A?")

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Ask a helper, report its letter, or end; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        letter, last = chosen_letter(message.final_text, "AC"), self._asked == len(self.agents) - 1
        if agent != "planner":
            told = self.score * (letter == self._letter)
            self._answers = last
            shown = self._shown("planner", f"It is {letter or '-'}. " + ("A or C?" if last else "C or A?"))
            return Step(observations=shown, components={agent: {"told": told}})
        if self._answers:
            success = letter == self._letter
            return ending([agent], {"right": float(success)}, "answered", success, {"calls": float(self._asked)})
        if letter != "C":
            self._answers = True
            return Step(observations=self._shown("planner", "A or C?"))
        self._asked += 1
        return Step(
            observations=self._shown(f"helper@{self._asked}", f"Round {self._round}: say {self._letter}."),
            components={agent: {"calls": -self.cost}},
        )

    def _shown(self, agent: str, text: str) -> Observations:
        return {agent: (Message("user", text),)}


def _round(rng: Random) -> dict[str, Any]:
    return {"round": rng.randint(1, 9999), "letter": rng.choice("AC")}
