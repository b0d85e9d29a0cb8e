"""Pairs of a better and a worse answer, or joint action, and their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.returns import labels, rows_by_policy

P = TypeVar("P", Episode, Trajectory)


class RowPair(NamedTuple):
    """Token rows of the preferred and of the rejected answer; each has several if several agents acted.

    ``margin`` is the difference of scores by which the preferred one must win.
    """

    chosen: tuple[Trajectory, ...]
    rejected: tuple[Trajectory, ...]
    margin: float = 0.0

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """All rows, the chosen ones first."""
        return self.chosen + self.rejected


class JointPair(NamedTuple):
    """The best and the worst episode of a group."""

    chosen: Episode
    rejected: Episode


def collate_pairs(
    pairs: Sequence[RowPair], numbers: Sequence[int] | None = None
) -> dict[str, tuple[PolicyBatch, Tensor]]:
    """Return the rows of each policy, and the index [B] of each row among the rows of all pairs, pair after pair.

    A pair is one episode: ``episode_tokens`` counts the action tokens of all policies in both of its joint actions.

    Args:
        pairs: P pairs.
        numbers: [P], group indices of the rows: rows of one group share the computation of their prompt. None numbers
            the pairs.
    """
    rows = [row for pair in pairs for row in pair.rows]
    margins = torch.tensor([pair.margin for pair in pairs for _ in pair.rows], dtype=torch.float32)
    numbered = zip(range(len(pairs)) if numbers is None else numbers, pairs, strict=True)
    answers = [2 * number + side for number, pair in numbered for side, acting in enumerate(pair[:2]) for _ in acting]
    of_pairs, tokens = [answer // 2 for answer in answers], Counter[int]()
    for row, pair in zip(rows, of_pairs, strict=True):
        tokens[pair] += row.num_actions
    comparisons = labels((pair, row.agent) for pair, row in zip(of_pairs, rows, strict=True))
    batches = rows_by_policy(rows, of_pairs, comparisons, of_pairs)
    indices = grouped((row.policy, index) for index, row in enumerate(rows))
    for policy, batch in batches.items():
        batch.episode_tokens = torch.tensor([tokens[of_pairs[index]] for index in indices[policy]])
        batch.joint_actions = torch.tensor([answers[index] for index in indices[policy]])
        batch.margins = margins[indices[policy]]
        batch.trajectories = ()  # pairs have no advantages
    return {policy: (batch, torch.tensor(indices[policy])) for policy, batch in batches.items()}


def joint_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[JointPair]:
    """Return the best against the worst episode of each group, by the mean return of the agents.

    The first of several equal returns counts. Failed episodes are left out, and so are groups whose best and worst
    return differ by ``reward_gap`` or less.

    Args:
        episodes: episodes of any number of groups.
        reward_gap: difference of the mean returns that a pair must exceed.
    """
    members = [((episode.task.key, episode.group), episode) for episode in episodes if not episode.failed]
    return [JointPair(best, worst) for best, worst in best_and_worst(members, reward_gap)]


def best_and_worst(members: Iterable[tuple[Hashable, P]], gap: float) -> list[tuple[P, P]]:
    """Return the first member with the highest and the first with the lowest reward of each group.

    Args:
        members: candidates with the key of their group.
        gap: groups whose rewards differ by this or less are left out.
    """
    pairs = [
        (max(group, key=lambda member: member.reward), min(group, key=lambda member: member.reward))
        for group in grouped(members).values()
    ]
    return [(best, worst) for best, worst in pairs if best.reward - worst.reward > gap]
