"""Credit in groups with branch episodes: individual messages against their alternatives, and leaves of trees."""

from __future__ import annotations

from collections.abc import MutableSet, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.advantages import (
    TurnBaseline,
    finite_rewards,
    group_centered_advantages,
    group_normalized_advantages,
    leaf_advantages,
)
from mrlm_pl.episode import Episode, turns_by_step
from mrlm_pl.learner.credit.decisions import DecisionReturns, ValuedDecision, row_of_turn
from mrlm_pl.learner.credit.returns import EpisodeCredit, group_numbers, labels
from mrlm_pl.learner.credit.team import warn_of_constant_sum
from mrlm_pl.learner.credit.turns import TurnReturns, turn_returns_of
from mrlm_pl.rewards import RewardShare, TurnBonus
from mrlm_pl.rollout.branches import Alternatives, Expansions, roots_of

WHOLE = 2**31
"""Number of steps that an episode shares with itself."""


@dataclass(frozen=True)
class AlternativeCredit(EpisodeCredit[DecisionReturns]):
    """Credit of messages that are compared with others in the same context.

    Args:
        branch_rule: alternatives to the messages; with ``rest: play`` the recorded message is compared as well, with
            ``replay`` it is not, since the rest of its episode answers it and not its alternatives.
        reward: whether the return is the team's mean or the agent's own.
    """

    of_decisions = True

    branch_rule: Alternatives = field()  # type: ignore[misc]
    reward: RewardShare

    def warn(self, episodes: Sequence[Episode], warned: MutableSet[Any]) -> None:
        if self.reward == "team":
            warn_of_constant_sum(episodes, "set `model.reward: own`", warned)

    def returns(
        self, episodes: Sequence[Episode], bonus: TurnBonus = None, greedy: Sequence[Episode] = ()
    ) -> DecisionReturns:
        """Return the returns of the messages.

        Args:
            episodes: ordinary episodes, then those with an alternative to one of their messages; failed ones are left
                out.
            bonus: function that returns a bonus for a turn, added to the return of its message; None adds nothing.
            greedy: not used.

        Raises:
            NonFiniteError: a reward is NaN or infinite.
        """
        played = {episode.id: episode for episode in episodes if not episode.failed}
        contexts: dict[tuple[str, str, int], list[Episode]] = {}
        for branch in played.values():
            if branch.origin is not None:
                key = (branch.origin.episode, branch.origin.agents[0], branch.origin.step)
                contexts.setdefault(key, [played[key[0]]] if self.branch_rule.rest == "play" else []).append(branch)
        decisions = []
        for (origin, agent, step), candidates in contexts.items():
            for episode in candidates:
                turn, row = turns_by_step(episode)[step][agent]
                value = episode.reward if self.reward == "team" else episode.rewards()[agent]
                value += bonus(turn) if bonus else 0.0
                decisions.append(ValuedDecision(episode.group, origin, row_of_turn(row, turn), turn, value))
        return DecisionReturns(
            finite_rewards(torch.tensor([decision.value for decision in decisions], dtype=torch.float64)),
            torch.tensor(labels((d.node, d.turn.index, d.turn.agent) for d in decisions), dtype=torch.int64),
            decisions,
            group_numbers(episodes),
            torch.full((len(decisions),), torch.nan, dtype=torch.float64),
        )


def common_steps(group: Sequence[Episode]) -> Tensor:
    """Return the number [N, N] of environment steps from the start that two episodes of a group share."""
    indices = {episode.id: index for index, episode in enumerate(group)}
    common = torch.zeros(len(group), len(group), dtype=torch.int64)
    for index, episode in enumerate(group):
        if episode.origin is not None:
            shared = common[indices[episode.origin.episode], :index].clamp(max=episode.origin.step)
            common[index, :index] = common[:index, index] = shared
        common[index, index] = WHOLE
    return common


@dataclass(frozen=True)
class LeafCredit(EpisodeCredit[TurnReturns]):
    """Advantages of the turns of leaves that branch from each other.

    Args:
        baseline: ``unbiased`` compares a turn with the leaves of the task that do not contain it; ``paper`` (arXiv
            2509.21240) adds the leaf's advantage in its tree and in the task.
        normalize: divide by standard deviations.
        branch_rule: expansions that add leaves to the ordinary episodes.

    Raises:
        ConfigurationError: an unknown name.
    """

    baseline: TurnBaseline = "unbiased"
    normalize: bool = True
    branch_rule: Expansions | None = field(default=None, kw_only=True)  # type: ignore[misc]

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]) -> TurnReturns:
        return turn_returns_of(episodes, bonus)

    def with_baselines(self, turns: TurnReturns) -> TurnReturns:
        """Return the turns with the returns of their leaves, and with ``unbiased`` the baselines."""
        _, plays = torch.unique(turns.play, return_inverse=True)
        returns = torch.zeros_like(turns.reward).index_add(0, plays, turns.reward)[plays]
        baseline = returns - replace(self, normalize=False).advantages(turns) if self.baseline == "unbiased" else None
        return replace(turns, returns=returns, baseline=baseline)

    def advantages(self, turns: TurnReturns) -> Tensor:
        """Return the advantage [S] fp64 of each turn."""
        played = [episode for episode in turns.rollout if not episode.failed]
        roots = roots_of(turns.rollout)
        trees = torch.tensor(labels(roots[episode.id] for episode in played), dtype=torch.int64)
        steps = torch.tensor([turn.index for turn in turns.turn], dtype=torch.int64)
        numbers = {episode.id: number for number, episode in enumerate(played)}
        episode_index = torch.tensor([numbers[episode.id] for episode in turns.episode], dtype=torch.int64)[turns.row]
        credit = torch.zeros_like(turns.reward)
        compare = group_normalized_advantages if self.normalize else group_centered_advantages
        for label in turns.comparison.unique():  # one agent in the leaves of one task
            compared = turns.comparison == label
            leaves, leaf = episode_index[compared].unique(return_inverse=True)
            returns = torch.zeros(len(leaves), dtype=torch.float64).index_add(0, leaf, turns.reward[compared])
            if self.baseline == "paper":
                leaf_credit = compare(returns, trees[leaves]) + compare(returns, torch.zeros_like(leaves))
                credit[compared] = leaf_credit[leaf]
            else:
                name = played[leaves[0]].group
                group = [number for number, episode in enumerate(played) if episode.group == name]
                inside = torch.searchsorted(torch.tensor(group), leaves)
                common = common_steps([played[number] for number in group])[inside][:, inside]
                credit[compared] = leaf_advantages(returns, common, leaf, steps[compared], normalize=self.normalize)
        return credit
