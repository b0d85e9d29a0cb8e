"""Counterfactual credit of agents: episodes are replayed without some of them."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch

from mrlm_pl.advantages import marginal_values, sampled_shapley_values, shapley_values
from mrlm_pl.episode import Episode, Origin, by_group
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.returns import EpisodeCredit, Returns, returns_of
from mrlm_pl.rewards import TurnBonus
from mrlm_pl.rollout.branches import BranchRule
from mrlm_pl.rollout.play import EVERY_STEP, Decision, EpisodeSpec
from mrlm_pl.rollout.replay import Rest, script_of
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import PositiveInt

logger = logging.getLogger(__name__)

Contribution = Literal["marginal", "shapley"]
"""An agent's contribution to the team's return.

- ``marginal``: the return minus the return without the agent; one replay for each agent.
- ``shapley``: its Shapley value over all coalitions, exact or from sampled orders.
"""

Absence = Literal["empty", "other"]
"""The messages of an absent agent.

- ``empty``: an empty message at each of its turns.
- ``other``: its decisions at the same steps of another episode of the group, the one before; sampled ones where it has
  none.
"""

MOST_EXACT = 6
"""Most agents whose Shapley values are computed exactly, with 2^6 coalitions."""

Script = dict[tuple[str, int], Decision]
Key = frozenset[tuple[str, int, tuple[int, ...]]]
"""The given decisions of a replay. Coalitions with equal ones have one value."""


@dataclass(frozen=True)
class Coalitions(BranchRule, EpisodeCredit[Returns]):
    """Replays of every episode without some of its agents, and the values of the others from them.

    The value of a coalition is the team's return when its members decide as in the episode and the others are absent.
    A group replays each set of decisions once; those that the group has played anyway are not replayed.

    Args:
        contribution: see :data:`Contribution`.
        orders: number of sampled orders in which agents join, each with its reverse, to estimate Shapley values; None
            computes them exactly.
        absent: see :data:`Absence`.
        rest: the members' decisions after the first step of an absent agent; see :data:`mrlm_pl.rollout.replay.Rest`.

    Raises:
        ConfigurationError: an unknown name, a value out of range, or in a rollout too many agents for exact values.
    """

    contribution: Contribution
    orders: PositiveInt | None = None
    absent: Absence = "empty"
    rest: Rest = "replay"

    @property
    def branch_rule(self) -> Coalitions:  # type: ignore[override]
        return self

    def due(self, group: Sequence[Episode], rounds: int) -> Sequence[EpisodeSpec]:
        if rounds:
            return ()
        planned: set[Key] = {_key(script_of(episode)) for episode, _ in _with_other(group)}
        specs: list[EpisodeSpec] = []
        for episode, other in _with_other(group):
            coalitions = defaultdict[frozenset[str], float](float)
            self.contributions(episode, coalitions.__getitem__)
            for members in coalitions:
                script, absent = self.script(episode, other, members)
                if (key := _key(script)) not in planned:
                    planned.add(key)
                    first = min(step for agent, step in script_of(episode) if agent in absent)
                    name = f"{episode.id}/without/{'+'.join(absent)}"
                    origin = Origin(episode.id, absent, first)
                    seed = derive_seed("coalition", episode.seed, *absent)
                    specs.append(
                        EpisodeSpec(name, episode.task, episode.group, seed, episode.iteration, script, origin)
                    )
        return specs

    def script(self, episode: Episode, other: Episode, members: frozenset[str]) -> tuple[Script, tuple[str, ...]]:
        """Return the given decisions of a coalition's replay, and the absent agents of the episode.

        Args:
            episode: recorded episode.
            other: episode from which the absent agents take their decisions, with ``absent: other``.
            members: agents of the coalition.
        """
        recorded = script_of(episode)
        absent = tuple(agent for agent in episode.trajectories if agent not in members)
        first = min((step for agent, step in recorded if agent in absent), default=0)
        script = {
            (agent, step): decision
            for (agent, step), decision in recorded.items()
            if agent in members and (self.rest == "replay" or step <= first or not absent)
        }
        if self.absent == "other":
            script |= {
                (agent, step): decision for (agent, step), decision in script_of(other).items() if agent in absent
            }
        for agent in absent if self.absent == "empty" else ():
            decision = next(decision for (name, _), decision in recorded.items() if name == agent)
            silent = dataclasses.replace(decision.sample, token_ids=(), logprobs=(), finish_reason="stop", spans=())
            script[agent, EVERY_STEP] = Decision(silent, decision.policy)
        return {key: dataclasses.replace(decision, scripted=True) for key, decision in script.items()}, absent

    def contributions(self, episode: Episode, value: Callable[[frozenset[str]], float]) -> dict[str, float]:
        """Return the contribution of each agent to an episode.

        Args:
            episode: recorded episode.
            value: function that returns the value of a coalition.

        Raises:
            ConfigurationError: there are too many agents for exact Shapley values.
        """
        agents = tuple(episode.trajectories)
        if self.contribution == "marginal":
            return marginal_values(agents, value)
        if self.orders is not None:
            return sampled_shapley_values(agents, value, self.orders, Random(derive_seed("orders", episode.seed)))
        if len(agents) > MOST_EXACT:
            raise ConfigurationError(
                f"exact Shapley values of the {len(agents)} agents of environment {episode.task.environment!r} take "
                f"{2 ** len(agents) - 1} replays of each episode; sample them with `orders: 4`, say, which takes at "
                f"most {2 * 4 * (len(agents) - 1) + 1}"
            )
        return shapley_values(agents, value)

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus = None, greedy: Sequence[Episode] = ()) -> Returns:
        """Return the contribution of each agent to each ordinary episode as its return.

        Episodes are left out if they or one of their replays failed.

        Args:
            episodes: one rollout with its replays.
            bonus: function that returns a bonus for a turn, added to the contribution of its agent.
            greedy: not used.
        """
        contributions: dict[str, Mapping[str, float]] = {}
        for group in by_group(episodes).values():
            values = self.values(group)
            for episode, other in _with_other(group):
                try:
                    contributions[episode.id] = self.contributions(
                        episode,
                        lambda members: values[_key(self.script(episode, other, members)[0])],  # noqa: B023 (called here)
                    )
                except KeyError:
                    logger.warning("episode %s is left out, as one of its replays failed", episode.id)
        all_returns = returns_of(episodes, bonus)
        all_returns = all_returns.take(
            [number for number, episode in enumerate(all_returns.episode) if episode.id in contributions]
        )
        contributed = [
            contributions[episode.id][agent]
            for episode, agent in zip(all_returns.episode, all_returns.agent, strict=True)
        ]
        return dataclasses.replace(
            all_returns, reward=torch.tensor(contributed, dtype=torch.float64) + all_returns.bonus
        )

    def values(self, group: Sequence[Episode]) -> dict[Key, float]:
        """Return the team's return in each ordinary episode and replay of a group."""
        ordinary = {episode.id: (episode, other) for episode, other in _with_other(group)}
        rewards = {_key(script_of(episode)): episode.reward for episode, _ in ordinary.values()}
        for branch in group:
            if branch.origin is not None and not branch.failed:
                episode, other = ordinary[branch.origin.episode]
                members = frozenset(episode.trajectories) - {*branch.origin.agents}
                rewards[_key(self.script(episode, other, members)[0])] = branch.reward
        return rewards


def _with_other(group: Sequence[Episode]) -> list[tuple[Episode, Episode]]:
    """Return each ordinary episode that did not fail with the one before it; the first is paired with the last."""
    ordinary = [episode for episode in group if episode.origin is None and not episode.failed]
    return [(episode, ordinary[index - 1]) for index, episode in enumerate(ordinary)]


def _key(script: Mapping[tuple[str, int], Decision]) -> Key:
    return frozenset((agent, step, tuple(decision.sample.token_ids)) for (agent, step), decision in script.items())
