"""Independent proximal policy optimization: every agent learns with a value of its own history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mrlm_pl.advantages import masked_moments, whiten
from mrlm_pl.algorithms.ppo import PPO
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.credit.team import paid_as_a_team, warn_of_constant_sum
from mrlm_pl.learner.credit.turns import RewardedRows
from mrlm_pl.learner.critics import check_critic, check_reads, critic_groups, critic_loss
from mrlm_pl.learner.ranks import merged
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare


class IPPO(PPO):
    """Independent PPO (arXiv 2011.09533): token-level PPO for each agent, ``V_i`` a function of its own history alone.

    With one policy for each agent and ``reward: own`` it is :class:`~mrlm_pl.algorithms.ppo.PPO`, which already treats
    every agent's rows as a world of their own. It adds what agents with one policy, or with one goal, need:

    * ``agent_critics``, one for each agent, also where agents share a policy: roles that see or earn different things
      do not share a value. Each critic reads its agent's tokens, learns from that agent's rows alone, and rests when
      there are none. Its loss is the mean over them; ``value_coefficient`` does not apply to it.
    * advantages whitened for each agent by itself, so that one that earns much does not drown out another.
    * ``reward: team``: each turn is paid the mean over the agents of what was earned from then until the agent's next
      turn, whoever earned it.

    Of a critic ``train/AGENT/critic/value_loss``, ``grad_norm`` and ``grad_norm_value`` are logged; the other numbers
    are those of :class:`~mrlm_pl.algorithms.ppo.PPO`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        agent_critics: a model that estimates the values, by agent, for all agents whose policy is trained; None gives
            each policy a value head, which agents in its seats share. A critic needs its agent's tokenizer.
        reward: what an agent's turns are paid: its ``own`` reward or the ``team``'s.
        whiten_over: whose advantages are whitened together: those of each ``agent`` or of each ``policy``.
        settings: see :class:`~mrlm_pl.algorithms.ppo.PPO`.

    Raises:
        ConfigurationError: a value out of range, or critics that do not fit the agents.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        agent_critics: dict[str, Policy] | None = None,
        reward: RewardShare = "own",
        whiten_over: Literal["agent", "policy"] = "agent",
        **settings: Any,
    ) -> None:
        if "critics" in settings:
            raise ConfigurationError(
                f"critics are by policy, but those of {type(self).__name__} are by agent: use agent_critics"
            )
        super().__init__(policies, seats, critics=None, **settings)
        if reward not in ("own", "team"):
            raise ConfigurationError(f"reward is {reward!r}; it must be own or team")
        if whiten_over not in ("agent", "policy"):
            raise ConfigurationError(f"whiten_over is {whiten_over!r}; it must be agent or policy")
        for agent, critic in (agent_critics or {}).items():
            check_critic(f"agent_critics.{agent}", critic)
        self.reward, self.whiten_over = reward, whiten_over
        self._warned = False
        self.agent_critics = nn.ModuleDict(agent_critics or {})

    def agent_critic(self, agent: str) -> Policy:
        """The critic of an agent."""
        critic = self.agent_critics[agent]
        assert isinstance(critic, Policy)
        return critic

    def check_agents(self, agents: Collection[str]) -> None:
        super().check_agents(agents)
        if not self.agent_critics:
            return
        learning = {agent for agent in agents if self.policy(self.seat(agent)).trained}
        for agent in sorted(learning ^ set(self.agent_critics)):
            what = "has no critic, but others have" if agent in learning else "is no agent that learns"
            raise ConfigurationError(
                f"agent_critics: {agent!r} {what}; give one to each of {sorted(learning)}, or to none for value heads"
            )
        for agent in sorted(learning):
            seat = self.seat(agent)
            check_reads(f"agent_critics.{agent}", self.agent_critic(agent), seat, self.policy(seat))

    @property
    def learners(self) -> dict[str, Policy]:
        critics = {critic_name(agent): self.agent_critic(agent) for agent in self.agent_critics}
        return {**super().learners, **critics}

    def has_values(self, name: str) -> bool:
        return not self.agent_critics

    def read_weights(self) -> None:
        super().read_weights()
        for agent in self.agent_critics:
            self.agent_critic(agent).load_critic(critic_name(agent))

    def networks(self) -> list[nn.Module]:
        critics = [network for agent in self.agent_critics for network in self.agent_critic(agent).networks()]
        return super().networks() + critics

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        for agent in self.agent_critics:
            name = critic_name(agent)
            groups += critic_groups(name, name, self.agent_critic(agent), self.value_learning_rate)
        return groups

    def prepare(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()
    ) -> dict[str, PolicyBatch]:
        if self.reward == "team":
            if not self._warned:
                self._warned = warn_of_constant_sum(episodes, "set `model.reward: own`")
            episodes = [paid_as_a_team(episode) for episode in episodes]
        return super().prepare(episodes, sampling, greedy)

    def _credit(self, name: str, table: RewardedRows, recomputed: bool) -> dict[str, PolicyBatch]:
        found = super()._credit(name, table, recomputed)
        if self.agent_critics:
            found |= self._critic_rows(table)
            found[name].values = found[name].returns = None
        return found

    def _critic_rows(self, table: RewardedRows) -> dict[str, PolicyBatch]:
        """What the agents' critics learn from, by learner; the table's batch has the values and returns."""
        device = table.batch.lengths.device
        return {
            critic_name(agent): table.batch.select(places.to(device))
            for agent, places in agent_places(table.agents).items()
        }

    def _critics_of(self, name: str, agents: Sequence[str]) -> list[Policy]:
        if not self.agent_critics:
            return super()._critics_of(name, agents)
        return [self.agent_critic(agent) for agent in agents]

    def _values(self, name: str, inputs: dict[str, Any], agents: Sequence[str]) -> Tensor:
        if not self.agent_critics:
            return super()._values(name, inputs, agents)
        values = torch.zeros(inputs["token_ids"].shape, device=inputs["token_ids"].device)
        for agent, places in agent_places(agents).items():
            places = places.to(values.device)
            values[places] = self.agent_critic(agent).values(**{key: value[places] for key, value in inputs.items()})
        return values

    def _whitened(self, advantages: Tensor, mask: Tensor, agents: Sequence[str]) -> Tensor:
        if self.whiten_over == "policy":
            return super()._whitened(advantages, mask, agents)
        places = agent_places(agents)
        own = {agent: masked_moments(advantages[rows], mask[rows]) for agent, rows in places.items()}
        moments = merged(self.trainer, own)
        whitened = torch.zeros_like(advantages)
        for agent, rows in places.items():
            whitened[rows] = whiten(advantages[rows], mask[rows], moments[agent])
        return whitened

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        if name in self.policies:
            return super().policy_loss(name, rows, batch)
        loss, metrics = critic_loss(self.learners[name], rows, batch.totals[name], self.value_clip)
        self.metrics.add_policy(name, metrics, rows.action_mask.sum())
        return loss

    def _is_saved(self, weight: str) -> bool:
        owner, _, rest = weight.partition(".")
        agent, _, inner = rest.partition(".")
        return self.agent_critic(agent).is_saved(inner) if owner == "agent_critics" else super()._is_saved(weight)

    def export(self, folder: str | Path, write: bool = True) -> None:
        """Write every trained policy as ``folder/NAME``, and critics as ``folder/AGENT-critic``."""
        super().export(folder, write)
        for agent in self.agent_critics:
            self.agent_critic(agent).save_pretrained(Path(folder) / f"{agent}-critic", write=write)


def critic_name(agent: str) -> str:
    """Name of an agent's critic among the learners."""
    return f"{agent}/critic"


def agent_places(agents: Sequence[str]) -> dict[str, Tensor]:
    """Numbers of the rows of each agent, given whose row each is."""
    return {
        agent: torch.tensor([place for place, name in enumerate(agents) if name == agent], dtype=torch.int64)
        for agent in dict.fromkeys(agents)
    }
