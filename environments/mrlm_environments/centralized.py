"""A team played by one agent: the baseline with the same budget for every result of a team."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.errors import ConfigurationError


class Centralized(Environment):
    """One agent, ``team``, writes the replies of all agents of another environment.

    With GRPO this is Centralized MAGRPO (CoMLRL 1.4.3). The agent reads the messages of all agents that are due, each
    in tags ``<agent_1>...</agent_1>``, numbered in the environment's order, and writes their replies in the same tags.
    A part runs to its closing tag, the next agent's tag or the end of the reply. The reply of an agent without a part
    is empty, which the environment judges as any other reply; the metric ``split`` is the fraction of the parts that
    were found. If one agent alone is due, a reply without tags is its reply. Rewards and their components are the
    means over the agents, as a team's are.

    Args:
        environment: the team's; its name, tasks and metrics are kept.
        separator: text between the replies, in the environment's order, instead of tags.

    Raises:
        ConfigurationError: the environment gives tools or is async.
    """

    name = "centralized"
    agents = ("team",)

    def __init__(self, environment: Environment, separator: str | None = None) -> None:
        if inspect.iscoroutinefunction(environment.step):
            raise ConfigurationError(
                f"centralized: environment {environment.name!r} is async or on a server; let the server play it "
                "centralized"
            )
        if equipped := [agent for agent in environment.agents if environment.tools(agent)]:
            raise ConfigurationError(
                f"centralized: agent {equipped[0]!r} of environment {environment.name!r} has tools, and calls in one "
                "reply belong to no part of it; choose an environment without tools"
            )
        if separator == "":
            raise ConfigurationError("centralized: separator is empty; give some text, or leave it out for tags")
        self.environment, self.separator = environment, separator
        self.name, self.quick, self.forks = environment.name, environment.quick, environment.forks
        self.secrets = environment.secrets

    def tasks(self, split: str) -> TaskSource:
        """Return the environment's tasks; see :meth:`Environment.tasks`."""
        return self.environment.tasks(split)

    def identity(self, task: Task) -> str | None:
        """Return the environment's; see :meth:`Environment.identity`."""
        return self.environment.identity(task)

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the environment's, as means over its agents; see :meth:`Environment.bounds`."""
        bounds = self.environment.bounds(task)
        return bounds and (bounds[0] / len(self.environment.agents), bounds[1] / len(self.environment.agents))

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the environment's gold replies in the form of this one; see :meth:`Environment.gold`."""
        team_gold = self.environment.gold(task)
        if team_gold is None:
            return None
        remaining = {agent: list(replies) for agent, replies in team_gold.items()}
        played, replies, done = self.copy(), list[str](), False
        played.reset(task)
        while not done:
            due = {
                tag: remaining[agent].pop(0) if len(remaining[agent]) > 1 else remaining[agent][0]
                for agent, tag in played._due.items()
            }
            tagged = "\n".join(f"<{tag}>{text}</{tag}>" for tag, text in due.items())
            replies.append(tagged if self.separator is None else self.separator.join(due.values()))
            done = played.step({"team": Message("assistant", replies[-1])}).done
        played.close()
        return {"team": replies}

    def reset(self, task: Task) -> Observations:
        """Pose the task to the one agent; see :meth:`Environment.reset`."""
        self._found = self._asked = 0
        return self._observed(self.environment.reset(task))

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Judge the parts of the reply; see :meth:`Environment.step`."""
        parts = self.parts(actions["team"].final_text)
        self._found += sum(part is not None for part in parts.values())
        self._asked += len(parts)
        step = self.environment.step({agent: Message("assistant", part or "") for agent, part in parts.items()})
        agents, sums = self.environment.agents, dict[str, float]()
        for agent, reward in step.rewards.items():
            for name, value in (step.components.get(agent) or {"reward": reward}).items():
                sums[name] = sums.get(name, 0.0) + value / len(agents)
        return replace(
            step,
            observations={} if step.done else self._observed(step.observations),
            rewards={},
            components={"team": sums},
            metrics={**step.metrics, "split": float(self._found), "split_of": float(self._asked)},
        )

    def parts(self, reply: str) -> dict[str, str | None]:
        """Return the reply of each agent that is due; None without a part.

        >>> from mrlm_environments import Halves
        >>> game = Centralized(Halves())
        >>> _ = game.reset(game.tasks("train")[0])
        >>> game.parts("<agent_2> c </agent_2> <agent_1>a"), game.parts("a c")
        ({'left': 'a', 'right': 'c'}, {'left': None, 'right': None})
        """
        if self.separator is not None:
            replies = [part.strip() for part in reply.split(self.separator, len(self._due) - 1)]
            return {agent: replies[index] if index < len(replies) else None for index, agent in enumerate(self._due)}
        matches = {
            agent: re.search(rf"<{tag}>(.*?)(?=</{tag}>|<agent_\d+>|$)", reply, re.DOTALL)
            for agent, tag in self._due.items()
        }
        if len(matches) == 1 and "<agent_" not in reply:
            return dict.fromkeys(matches, reply)
        return {agent: match and match[1].strip() for agent, match in matches.items()}

    def _observed(self, observations: Observations) -> Observations:
        """Return the messages of all agents that are due as one."""
        tags = {agent: f"agent_{number}" for number, agent in enumerate(self.environment.agents, 1)}
        self._due = {agent: tag for agent, tag in tags.items() if agent in observations}
        shown = [
            f"<{tag}>\n" + "\n".join(message.content for message in observations[agent]) + f"\n</{tag}>"
            for agent, tag in self._due.items()
        ]
        tagged = " ".join(f"<{tag}>...</{tag}>" for tag in self._due.values())
        form = tagged if self.separator is None else self.separator.join("..." for _ in self._due)
        return {"team": (Message("user", "\n".join([*shown, f"Write all replies: {form}"])),)}

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()

    def copy(self) -> Centralized:
        """Return an independent instance; see :meth:`Environment.copy`."""
        copied = copy.copy(self)
        copied.environment = self.environment.copy()
        return copied
