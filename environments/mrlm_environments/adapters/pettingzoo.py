"""PettingZoo's environments, whose agents act in turn or simultaneously, played by text."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mrlm_environments.adapters.codec import TextCodec
from mrlm_environments.adapters.spaces import Moment, SpacesEnvironment, View, view
from mrlm_environments.libraries import library
from mrlm_pl.errors import ConfigurationError


class PettingZooEnvironment(SpacesEnvironment):
    """An environment of PettingZoo, such as ``classic/tictactoe_v3``; needs the extra ``pettingzoo``.

    Agents act in turn with the library's ``AECEnv``, or, with ``parallel``, simultaneously with its ``ParallelEnv``.
    Legal actions are those of the ``action_mask`` in the observation or the info, else all. A terminated or truncated
    agent leaves; the episode ends with the last one, ``truncated`` if a limit ended it. Rewards are given in the step
    in which the environment gives them, even to agents that did not act. Each task is a seed.

    Args:
        id: environment id as for ``pettingzoo.make``, or the import path of a module with ``env`` or ``parallel_env``.
        settings: arguments of the environment.
        parallel: whether all agents act simultaneously.
        codec: observations and actions as text; see :class:`TextCodec`.
        prompt: first message of each agent; see :class:`SpacesEnvironment`.
        retries: extra replies to one observation after one without a legal action.
        penalty: reward of an agent that ends the episode so.
        success_at: the episode succeeds if the agents' mean return is at least this.
    """

    name = "pettingzoo"

    def __init__(
        self,
        id: str,
        settings: dict[str, Any] | None = None,
        parallel: bool = False,
        codec: TextCodec | None = None,
        prompt: str = "{id}. You are {agent}. {instructions}",
        retries: int = 1,
        penalty: float = -1.0,
        success_at: float | None = None,
    ) -> None:
        self.parallel = parallel
        super().__init__(id, settings, codec, prompt, retries, penalty, success_at)

    def make(self) -> Any:
        """Return a new environment; see :meth:`SpacesEnvironment.make`."""
        pettingzoo = library("pettingzoo", "pettingzoo")
        registered = pettingzoo.parallel_registry if self.parallel else pettingzoo.aec_registry
        if "/" in self.id or self.id in registered:
            return pettingzoo.make("parallel" if self.parallel else "aec", self.id, **self.settings)
        return getattr(importlib.import_module(self.id), "parallel_env" if self.parallel else "env")(**self.settings)

    def agents_of(self, env: Any) -> tuple[str, ...]:
        """Return all agents, present or not; see :meth:`SpacesEnvironment.agents_of`.

        Raises:
            ConfigurationError: the environment does not say which there can be.
        """
        agents = getattr(env, "possible_agents", None)
        if not agents:
            raise ConfigurationError(f"pettingzoo: {self.id!r} has no `possible_agents`; list them there")
        self._ids = {str(agent): agent for agent in agents}
        return tuple(self._ids)

    def action_space(self, env: Any, agent: str) -> Any:
        """Return an agent's action space; see :meth:`SpacesEnvironment.action_space`."""
        return env.action_space(self._ids[agent])

    def start(self, env: Any, seed: int) -> Moment:
        """Reset; see :meth:`SpacesEnvironment.start`."""
        if not self.parallel:
            env.reset(seed=seed)
            return Moment(self._selected(env))
        observations, infos = env.reset(seed=seed)
        return Moment({str(agent): view(observations[agent], infos.get(agent, {})) for agent in env.agents})

    def act(self, env: Any, actions: Mapping[str, Any]) -> Moment:
        """Step; see :meth:`SpacesEnvironment.act`."""
        if not self.parallel:
            return self._act_in_turn(env, *actions.values())
        observations, rewards, terminated, truncated, infos = env.step(
            {self._ids[agent]: action for agent, action in actions.items()}
        )
        views = {
            str(agent): view(observations[agent], infos.get(agent, {}))
            for agent in env.agents
            if not (terminated[agent] or truncated[agent])
        }
        limited = not views and any(truncated[agent] and not terminated[agent] for agent in truncated)
        return Moment(views, {str(agent): reward for agent, reward in rewards.items()}, limited)

    def _act_in_turn(self, env: Any, action: Any) -> Moment:
        """Step by the selected agent; step the dead ones by None until a living one is selected or none is left."""
        before = {**env._cumulative_rewards, env.agent_selection: 0}  # the agent's own sum starts at 0
        env.step(action)
        rewards = {str(agent): total - before.get(agent, 0) for agent, total in env._cumulative_rewards.items()}
        limited = False
        while env.agents:
            if views := self._selected(env):
                return Moment(views, rewards)
            agent = env.agent_selection
            limited = limited or (env.truncations[agent] and not env.terminations[agent])
            env.step(None)
        return Moment({}, rewards, limited)

    def _selected(self, env: Any) -> dict[str, View]:
        """Return the selected agent's view; empty if it is dead."""
        observation, _, terminated, truncated, info = env.last()
        return {} if terminated or truncated else {str(env.agent_selection): view(observation, info)}
