"""Credit of individual tokens: trajectories with the reward of each turn on its last token, and GAE along them.

:func:`rewarded_rows` puts the rewards [B, T] of a rollout on the rows of each policy. :meth:`TokenCredit.credit` then
subtracts the penalty, lets the critic value the tokens, computes advantages and returns [B, T] along the trajectories
of each agent in each episode, whitens the advantages over all ranks, and keeps return and value of each turn for the
record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import NO_MOMENTS, Moments, masked_moments, token_gae, turn_discounts, whiten
from mrlm_pl.episode import Episode
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.records import turn_means
from mrlm_pl.learner.credit.returns import (
    CreditParts,
    EpisodeCredit,
    acting_rows,
    group_numbers,
    labels,
    rows_by_policy,
)
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.rewards import TurnBonus
from mrlm_pl.settings import UnitInterval

DiscountUnit = Literal["turn", "token"]
"""The unit of the discount factor: each turn of the agent, or each token."""


@dataclass(frozen=True)
class TokenCredit(EpisodeCredit):
    """Generalized advantage estimation over the tokens of an agent (arXiv 1506.02438), without a critic of values 0.

    Args:
        gamma: discount factor.
        lam: GAE's lambda per token; 0 trusts the values, 1 the returns.
        discount_unit: ``turn`` discounts from turn to turn, ``token`` from token to token.
        whiten: tokens over which advantages are whitened on all ranks: those of each ``policy``, or of each ``agent``
            of a policy; None does not whiten.

    Raises:
        ConfigurationError: a value is out of range.
    """

    compares = False

    gamma: UnitInterval = 1.0
    lam: UnitInterval = 1.0
    discount_unit: DiscountUnit = "turn"
    whiten: Literal["policy", "agent"] | None = "policy"

    def returns(
        self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]
    ) -> dict[str, RewardedRows]:
        return rewarded_rows(episodes, bonus)

    def whitened_together(self, agents: Sequence[str]) -> dict[str, Tensor]:
        """Return the indices of the rows that are whitened together, by a name that is equal on all ranks."""
        if self.whiten == "agent":
            return rows_of_agents(agents)
        return {} if self.whiten is None else {"": torch.arange(len(agents))}

    def discounts(self, mask: Tensor) -> Tensor:
        """Return the discount factor [B, T] after each token of the action mask."""
        return turn_discounts(mask, self.gamma) if self.discount_unit == "turn" else self.gamma * mask.float()

    def observed(self, policies: Mapping[str, RewardedRows], critic: Any) -> dict[tuple[str, str], Moments]:
        """Return the moments of the tokens' returns, by policy and key of the rows of a value head."""
        moments = dict[tuple[str, str], Moments]()
        for name, rewarded in policies.items():
            mask, zeros = rewarded.batch.action_mask, torch.zeros_like(rewarded.rewards)
            returns = rewarded.advantages(zeros, self.discounts(mask), 1.0, zeros[:, 0])[1]
            for agent, rows in critic.rows_of_heads(rewarded.agents).items():
                moments[name, agent] = masked_moments(returns[rows], mask[rows])
        return moments

    def credit(self, returns: Mapping[str, RewardedRows], parts: CreditParts[Any]) -> dict[str, PolicyBatch]:
        """Return the trained policies' trajectories with the advantage of each token, and the critics' trajectories.

        The baseline of a turn is its value, or without a critic the mean over the tokens that it is whitened with. The
        quality of the values is logged.
        """
        policies, critic = {name: returns[name] for name in parts.policies if name in returns}, parts.critic
        for name, rewarded in policies.items():
            rewarded.rewards = rewarded.rewards - parts.penalty(name, rewarded.batch)
        if critic is not None and critic.normalized:
            critic.observe(parts.metrics.trainer, self.observed(policies, critic))
        local_moments: dict[tuple[str, str], Moments] = {}
        estimates: dict[str, tuple[Tensor, Tensor]] = {}
        for name, rewarded in policies.items():
            token_returns, values = estimates[name] = self._estimate(name, rewarded, critic)
            rows, mask = rewarded.batch, rewarded.batch.action_mask
            if critic is not None:
                local_moments[name, "return"] = masked_moments(token_returns, mask)
                local_moments[name, "error"] = masked_moments(token_returns - values, mask)
            for label, indices in self.whitened_together(rewarded.agents).items():
                local_moments[name, f"whiten/{label}"] = masked_moments(rows.advantages[indices], mask[indices])
        moments = sum_over_ranks(parts.metrics.trainer, local_moments)
        credited = {name: rewarded.batch for name, rewarded in policies.items()}
        for name, rewarded in policies.items():
            rows = rewarded.batch
            for label, indices in self.whitened_together(rewarded.agents).items():
                over_ranks = moments[name, f"whiten/{label}"]
                rows.advantages[indices] = whiten(rows.advantages[indices], rows.action_mask[indices], over_ranks)
                if critic is None:
                    estimates[name][1][indices] = over_ranks.mean
            means = (turn_means(of_tokens, rows.trajectories) for of_tokens in estimates[name])
            rows.turn_baselines = tuple([*zip(*turns, strict=True)] for turns in zip(*means, strict=True))
            if critic is not None and critic.learners:
                credited |= critic.rows(rewarded)
                rows.values = rows.returns = None  # of the critic's own rows
        for name in parts.policies if critic is not None else ():
            parts.metrics.add_values(name, *(moments.get((name, kind), NO_MOMENTS) for kind in ("return", "error")))
        return credited

    def _estimate(self, name: str, rewarded: RewardedRows, critic: Any) -> tuple[Tensor, Tensor]:
        """Return the returns and values [B, T] of a policy's tokens, and put their advantages into its batch."""
        rows, zeros = rewarded.batch, torch.zeros_like(rewarded.rewards)
        values, end_values = (zeros, zeros[:, 0]) if critic is None else critic.estimates(name, rewarded)
        rows.advantages, returns = rewarded.advantages(values, self.discounts(rows.action_mask), self.lam, end_values)
        if critic is not None:
            rows.values, rows.returns = values, returns
        return returns, values


@dataclass
class RewardedRows:
    """The trajectories of one policy with their rewards.

    Attributes:
        batch: batch of B rows, with their trajectories.
        rewards: [B, T], a turn's reward on its last token, 0 elsewhere.
        episodes: [B] record of each row's episode.
    """

    batch: PolicyBatch
    rewards: Tensor
    episodes: list[Episode]

    @property
    def agents(self) -> list[str]:
        """Agent of each row."""
        return [row.agent for row in self.batch.trajectories]

    @property
    def chains(self) -> list[list[int]]:
        """The rows of each agent in each episode, in order: one, or several where a chat template rewrote history."""
        keys = zip(map(id, self.episodes), self.agents, strict=True)
        return list(grouped((key, index) for index, key in enumerate(keys)).values())

    @property
    def unfinished(self) -> Tensor:
        """[B] True for the last row of each agent in a truncated episode."""
        last = {chain[-1] for chain in self.chains}
        return torch.tensor([episode.truncated and index in last for index, episode in enumerate(self.episodes)])

    def advantages(self, values: Tensor, discounts: Tensor, lam: float, end_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return GAE advantages and returns, both [B, T], along each chain; see :func:`mrlm_pl.advantages.token_gae`.

        Args:
            values, discounts: [B, T], values and discount factors; not read outside the action mask.
            lam: GAE's lambda.
            end_values: [B], value of the last state of a truncated episode, 0 for other rows.
        """
        rewards, mask, chains = self.rewards, self.batch.action_mask, self.chains
        lengths = torch.stack([mask[chain].sum() for chain in chains])
        chain_mask = torch.arange(int(lengths.max())) < lengths[:, None]

        def moved(tokens: Tensor, source: Tensor, target: Tensor) -> Tensor:
            """Return the tokens of one mask at the places of the other, which has them in the same order."""
            return tokens.new_zeros(target.shape).masked_scatter(target, tokens[source])

        rewards, values, gamma = (moved(tokens, mask, chain_mask) for tokens in (rewards, values, discounts))
        ends = end_values[[chain[-1] for chain in chains]]
        advantages, returns = token_gae(rewards, values, chain_mask, gamma=gamma, lam=lam, bootstrap_values=ends)
        return moved(advantages, chain_mask, mask), moved(returns, chain_mask, mask)


def rows_of_agents(agents: Sequence[str]) -> dict[str, Tensor]:
    """Return the indices of the rows of each agent, given the agent of each row."""
    rows = grouped((agent, index) for index, agent in enumerate(agents))
    return {agent: torch.tensor(indices) for agent, indices in rows.items()}


def rewarded_rows(episodes: Sequence[Episode], turn_bonus: TurnBonus = None) -> dict[str, RewardedRows]:
    """Return the trajectories of every policy with the rewards of its turns; failed episodes are left out.

    Args:
        episodes: episodes of one rollout.
        turn_bonus: function that returns a bonus for a turn, added to the environment's reward; None adds nothing.
    """
    groups, acting = group_numbers(episodes), acting_rows(episodes)
    batches = rows_by_policy(
        [trajectory for _, trajectory in acting],
        [groups[episode.group] for episode, _ in acting],
        labels((episode.group, trajectory.agent) for episode, trajectory in acting),
        labels(id(episode) for episode, _ in acting),
    )
    rewarded = dict[str, RewardedRows]()
    for policy, batch in batches.items():
        rewards = torch.zeros_like(batch.action_mask, dtype=torch.float32)
        for row, trajectory in enumerate(batch.trajectories):
            for turn in trajectory.turns:
                rewards[row, turn.stop - 1] += turn.reward + (turn_bonus(turn) if turn_bonus else 0.0)
        rewarded[policy] = RewardedRows(batch, rewards, [e for e, trajectory in acting if trajectory.policy == policy])
    return rewarded
