"""An environment whose rewards are a reward model's scores."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence

from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource, ToolSchema
from mrlm_pl.episode import Role
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE, TextScorer, team_message


class ScoredEnvironment(Environment, proxy=True):
    """Another environment with the score of a reward model instead of its rewards, for reinforcement learning on it.

    At the end of an episode every agent earns the same: the probability of the model's score for the conversation of
    the team, in which a step's observations are one user's message and its joint action is one reply, with a line
    ``[agent] role: text`` for each message. ``PairwiseRewardModel`` with a ``JointPreferenceDataModule`` trains such a
    model. A single agent's conversation is scored as it is, like the answers of ``PreferenceDataModule`` and
    ``AnswerDataModule``. The environment's own mean return is the metric ``task_reward``, the score ``verifier_score``.
    An episode that ends at the limit of ``data.max_turns`` has no score.

    Args:
        environment: poses the tasks; its methods are not ``async``.
        scorer: the reward model: :class:`~mrlm_pl.reward_models.RewardModel` or the client of a server.

    Raises:
        ConfigurationError: the environment's methods are ``async``.
    """

    name = "scored"

    def __init__(self, environment: Environment, scorer: TextScorer) -> None:
        if inspect.iscoroutinefunction(environment.step) or inspect.iscoroutinefunction(environment.reset):
            raise ConfigurationError(
                f"environment {environment.name!r} has async methods, which ScoredEnvironment cannot call; write them "
                "without async"
            )
        self.environment, self.scorer = environment, scorer
        self.name, self.agents, self.forks = environment.name, environment.agents, environment.forks
        self.secrets = environment.secrets

    def copy(self) -> Environment:
        """Return an independent instance with the same scorer; see :meth:`Environment.copy`."""
        copied = copy.copy(self)
        copied.environment = self.environment.copy()
        return copied

    def tasks(self, split: str) -> TaskSource:
        """Return the environment's tasks; see :meth:`Environment.tasks`."""
        return self.environment.tasks(split)

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the environment's tools; see :meth:`Environment.tools`."""
        return self.environment.tools(agent)

    def identity(self, task: Task) -> str | None:
        """Return the environment's; see :meth:`Environment.identity`."""
        return self.environment.identity(task)

    def reset(self, task: Task) -> Observations:
        """Begin an episode; see :meth:`Environment.reset`."""
        observations = self.environment.reset(task)
        self._messages = self._conversation("user", observations)
        self._earned = 0.0
        return observations

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Judge the joint action; see :meth:`Environment.step`.

        Raises:
            NonFiniteError: the score is NaN or infinite.
        """
        task_step = self.environment.step(actions)
        self._messages += self._conversation("assistant", {agent: [action] for agent, action in actions.items()})
        self._earned += sum(task_step.rewards.values()) / len(self.agents)
        if not task_step.done:
            self._messages += self._conversation("user", task_step.observations)
            return dataclasses.replace(task_step, rewards={}, components={})
        (score,) = self.scorer.probabilities([self._messages])
        return dataclasses.replace(
            task_step,
            rewards=dict.fromkeys(self.agents, score),
            components={agent: {"reward_model": score} for agent in self.agents},
            metrics={**task_step.metrics, VERIFIER_SCORE: score, "task_reward": self._earned},
        )

    def _conversation(self, role: Role, messages: Mapping[str, Sequence[Message]]) -> tuple[Message, ...]:
        """Return a step's messages as the reward model reads them."""
        if len(self.agents) == 1:
            return tuple(itertools.chain.from_iterable(messages.values()))
        return (team_message(role, messages),)

    def close(self) -> None:
        """Close the environment and the scorer; see :meth:`Environment.close`."""
        self.environment.close()
        self.scorer.close()
