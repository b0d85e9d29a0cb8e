"""Gymnasium's environments for one agent that plays by text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlm_environments.adapters.codec import TextCodec
from mrlm_environments.adapters.spaces import Moment, SpacesEnvironment, View, view
from mrlm_environments.libraries import library


class GymnasiumEnvironment(SpacesEnvironment):
    """An environment of Gymnasium, such as ``FrozenLake-v1``; needs the extra ``gymnasium``.

    Legal actions are those of ``info["action_mask"]`` or of the observation's, else all. An episode that ends by a time
    limit is ``truncated``. Each task is a seed.

    Args:
        id: environment id as for ``gymnasium.make``; ``my_module:My-v0`` imports the module that registers it.
        settings: arguments of ``gymnasium.make``, such as ``max_episode_steps`` or ``is_slippery``.
        codec: observations and actions as text; see :class:`TextCodec`.
        prompt: first message; see :class:`SpacesEnvironment`.
        render: show ``render()`` instead of the observation, by the render mode ``ansi``.
        retries: extra replies to one observation after one without a legal action.
        penalty: reward of an episode that ends so.
        success_at: the episode succeeds if its return is at least this.
    """

    name = "gymnasium"

    def __init__(
        self,
        id: str,
        settings: dict[str, Any] | None = None,
        codec: TextCodec | None = None,
        prompt: str = "{id}. {instructions}",
        render: bool = False,
        retries: int = 1,
        penalty: float = -1.0,
        success_at: float | None = None,
    ) -> None:
        self.render = render
        super().__init__(id, settings, codec, prompt, retries, penalty, success_at)

    def make(self) -> Any:
        """Return a new environment; see :meth:`SpacesEnvironment.make`."""
        settings = {"render_mode": "ansi", **self.settings} if self.render else self.settings
        return library("gymnasium", "gymnasium").make(self.id, **settings)

    def start(self, env: Any, seed: int) -> Moment:
        """Reset; see :meth:`SpacesEnvironment.start`."""
        return Moment(self._views_of(env, *env.reset(seed=seed)))

    def act(self, env: Any, actions: Mapping[str, Any]) -> Moment:
        """Step; see :meth:`SpacesEnvironment.act`."""
        observation, reward, terminated, truncated, info = env.step(actions["agent"])
        views = {} if terminated or truncated else self._views_of(env, observation, info)
        return Moment(views, {"agent": reward}, truncated=truncated and not terminated)

    def _views_of(self, env: Any, observation: Any, info: Mapping[str, Any]) -> dict[str, View]:
        seen = view(observation, info)
        return {"agent": View(env.render(), seen.mask) if self.render else seen}
