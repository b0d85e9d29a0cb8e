"""Environments with Gymnasium's spaces as conversations: observations, and turns with illegal replies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrlm_environments.adapters.codec import IllegalActionError, TextCodec
from mrlm_environments.libraries import asked_for
from mrlm_pl.environment import Environment, Message, Observations, SeededTasks, Step, Task, TaskSource
from mrlm_pl.settings import NonNegativeInt


@dataclass(frozen=True)
class View:
    """The view of an agent that acts next: its observation, and the mask of its legal actions or None."""

    observation: Any
    mask: Any = None


def view(observation: Any, info: Mapping[str, Any]) -> View:
    """Return a view, with the mask of the observation or the info.

    >>> view({"observation": 3, "action_mask": [1, 0]}, {}), view(3, {"action_mask": [0, 1]})
    (View(observation=3, mask=[1, 0]), View(observation=3, mask=[0, 1]))
    """
    if not isinstance(observation, Mapping) or "action_mask" not in observation:
        return View(observation, info.get("action_mask"))
    rest = {key: part for key, part in observation.items() if key != "action_mask"}
    return View(rest["observation"] if set(rest) == {"observation"} else rest, observation["action_mask"])


@dataclass(frozen=True)
class Moment:
    """A library's environment between two actions.

    Args:
        views: view of each agent that acts next; empty at the end.
        rewards: rewards by agent since the last moment.
        truncated: whether a limit ended the episode.
    """

    views: Mapping[str, View]
    rewards: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False


class SpacesEnvironment(Environment):
    """Base class of the environments with Gymnasium's spaces.

    A reply without a legal action is answered with the reason and the legal actions; after ``retries`` such answers to
    one decision the episode ends (``illegal_action``) and the agent earns ``penalty``. The metric ``illegal`` counts
    these replies. A reward from before an agent's first decision is added to that of the decision.

    A copy has no episode (``forks`` is False), since copies of many environments differ from the original; turn trees
    replay the earlier turns.

    Args:
        id: name of the library's environment.
        settings: arguments of the library's environment.
        codec: converts observations and actions from and to text; None is ``TextCodec()``.
        prompt: first message of each agent, before the observation, with {id}, {agent} and {instructions}.
        retries: extra replies to one observation after one without a legal action.
        penalty: reward of an agent that ends the episode so.
        success_at: the episode succeeds if the agents' mean return is at least this; None: success is not known.

    Raises:
        ConfigurationError: the library is not installed, does not know the environment or its settings, or an
            observation, action or mask has no text form.
    """

    def __init__(
        self,
        id: str,
        settings: dict[str, Any] | None,
        codec: TextCodec | None,
        prompt: str,
        retries: NonNegativeInt,
        penalty: float,
        success_at: float | None,
    ) -> None:
        self.id, self.settings, self.codec, self.prompt = id, dict(settings or {}), codec or TextCodec(), prompt
        self.retries, self.penalty, self.success_at = retries, penalty, success_at
        self._env: Any = None
        self._spoke: set[str] = set()
        with asked_for(f"{self.name}: {id!r} with settings {self.settings} and prompt {prompt!r}"):
            env = self.make()
            self.agents = self.agents_of(env)
            self._observations(env, self.start(env, 0).views)
            env.close()

    @abstractmethod
    def make(self) -> Any:
        """Return a new environment of the library."""

    def agents_of(self, env: Any) -> tuple[str, ...]:
        """Return all agents of the library's environment, by default one."""
        return ("agent",)

    def action_space(self, env: Any, agent: str) -> Any:
        """Return an agent's action space, by default that of the library's environment."""
        return env.action_space

    @abstractmethod
    def start(self, env: Any, seed: int) -> Moment:
        """Reset the library's environment."""

    @abstractmethod
    def act(self, env: Any, actions: Mapping[str, Any]) -> Moment:
        """Step the library's environment by the actions of the agents that are due."""

    def tasks(self, split: str) -> TaskSource:
        """Return seeds without end; see :meth:`Environment.tasks`."""
        return SeededTasks(
            self.name, split, lambda rng: {"seed": rng.randrange(1 << 31)}, lambda data: str(data["seed"])
        )

    def reset(self, task: Task) -> Observations:
        """Begin an episode; see :meth:`Environment.reset`."""
        if self._env is None:
            self._env = self.make()
        self._actions: dict[str, Any] = {}
        self._tries = dict.fromkeys(self.agents, 0)
        self._returns = dict.fromkeys(self.agents, 0.0)
        self._held: dict[str, float] = {}
        self._spoke = set()
        self._counts = {"illegal": 0.0, "illegal_of": 0.0}
        self._views = self.start(self._env, task.data["seed"]).views
        return self._observations(self._env, self._views)

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Read the replies and, once all are legal, act; see :meth:`Environment.step`."""
        env, faults = self._env, {}
        self._spoke.update(actions)
        for agent, message in actions.items():
            space, mask = self.action_space(env, agent), self._views[agent].mask
            try:
                self._actions[agent] = self.codec.action(message.final_text, space, mask)
            except IllegalActionError as error:
                faults[agent] = str(error)
        self._counts["illegal"] += len(faults)
        self._counts["illegal_of"] += len(actions)
        lost = [agent for agent in faults if self._tries[agent] == self.retries]
        if faults and not lost:
            for agent in faults:
                self._tries[agent] += 1
            return Step(
                {agent: (Message("user", fault),) for agent, fault in faults.items()}, metrics=dict(self._counts)
            )
        if lost:
            moment, reason = Moment({}, dict.fromkeys(lost, self.penalty)), "illegal_action"
        else:
            chosen, self._actions = self._actions, {}
            self._tries = dict.fromkeys(self.agents, 0)
            moment = self.act(env, chosen)
            reason = "truncated" if moment.truncated else "terminated"
        self._views, done = moment.views, not moment.views
        rewards = self._pay_out(moment.rewards)
        mean = sum(self._returns.values()) / len(self.agents)
        return Step(
            observations=self._observations(env, self._views),
            components={agent: {"penalty" if lost else "reward": reward} for agent, reward in rewards.items()},
            done=done,
            stop_reason=reason if done else "",
            truncated=bool(moment.truncated),  # of numpy in some environments
            success=mean >= self.success_at if done and self.success_at is not None else None,
            metrics=dict(self._counts),
        )

    def close(self) -> None:
        """Close the library's environment; see :meth:`Environment.close`."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the library's environment; a copy makes its own."""
        return {**self.__dict__, "_env": None}

    def _observations(self, env: Any, views: Mapping[str, View]) -> Observations:
        found = {}
        for agent, seen in views.items():
            space, parts = self.action_space(env, agent), []
            if agent not in self._spoke:
                instructions = self.codec.instructions(space)
                parts.append(self.prompt.format(id=self.id, agent=agent, instructions=instructions))
            parts.append(self.codec.observation(seen.observation, agent))
            parts.append(self.codec.choices(space, seen.mask))
            found[agent] = (Message("user", "\n".join(filter(None, parts))),)
        return found

    def _pay_out(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """Return the rewards of agents that have decided, with those from before."""
        for agent, reward in rewards.items():
            self._held[agent] = self._held.get(agent, 0.0) + float(reward)
        due_rewards = {agent: self._held.pop(agent) for agent in list(self._held) if agent in self._spoke}
        for agent, reward in due_rewards.items():
            self._returns[agent] += reward
        return due_rewards
