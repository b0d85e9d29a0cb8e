"""Filters and scales of the advantages of a whole rollout, over all ranks; every rank must call them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableSet, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.advantages import (
    masked_moments,
    task_moments,
    task_scaled_advantages,
    unnormalizable_tasks,
    whiten,
)
from mrlm_pl.advantages.task_normalization import TaskNormalization
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch, episode_token_counts, not_none
from mrlm_pl.learner.credit.returns import returns_of, task_types
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.ranks import gather_ranks, sum_over_ranks
from mrlm_pl.losses import top_entropy_threshold
from mrlm_pl.rewards import TurnBonus

logger = logging.getLogger(__name__)


def with_greedy(episodes: Sequence[Episode], greedy: Sequence[Episode]) -> list[Episode]:
    """Return the episodes of groups whose greedy episode did not fail."""
    played = {episode.group for episode in greedy if not episode.failed and episode.trajectories}
    return [episode for episode in episodes if episode.group in played]


def note_baselines(metrics: Metrics, episodes: Sequence[Episode], greedy: Sequence[Episode], bonus: TurnBonus) -> None:
    """Log the baselines of all ranks.

    Args:
        metrics: metrics of the algorithm.
        episodes: episodes of the rollout.
        greedy: one greedy episode for each group.
        bonus: function that returns a bonus for a turn, added to the environment's reward; None adds nothing.
    """
    missing = {episode.group for episode in episodes} - {episode.group for episode in with_greedy(episodes, greedy)}
    if missing:
        causes = [episode.error for episode in greedy if episode.group in missing]
        logger.warning("groups left out, as their greedy episode failed: %d; the first: %s", len(missing), causes[0])
    rewards = returns_of(greedy, bonus).reward.tolist()
    sums = {"total": math.fsum(rewards), "count": len(rewards), "missing": len(missing)}
    totals = sum_over_ranks(metrics.trainer, sums)
    if totals["count"]:
        metrics.rollout["train/greedy_reward"] = totals["total"] / totals["count"]
    metrics.rollout["train/missing_baselines"] = float(totals["missing"])


def whiten_rows(trainer: Any, batches: Mapping[str, PolicyBatch]) -> None:
    """Whiten each policy's advantages over its tokens, in place."""
    moments = sum_over_ranks(
        trainer, {name: masked_moments(rows.advantages, rows.action_mask) for name, rows in batches.items()}
    )
    for name, rows in batches.items():
        rows.advantages = whiten(rows.advantages, rows.action_mask, moments[name])


def exclude_zero_variance(metrics: Metrics, batches: Mapping[str, PolicyBatch]) -> None:
    """Exclude (group, agent) pairs in which every advantage is 0 from the loss, and log their fraction."""
    counts_by_policy: dict[str, Tensor] = {}
    for name, rows in batches.items():
        useful = (rows.advantages != 0).any(-1)
        rows.action_mask &= torch.isin(rows.comparisons, rows.comparisons[useful])[:, None]
        rows.episode_tokens = episode_token_counts(rows.action_mask, not_none(rows.episodes))
        pairs, used = len(rows.comparisons.unique()), len(rows.comparisons[useful].unique())
        counts_by_policy[name] = torch.tensor([pairs - used, pairs])
    for name, counts in sum_over_ranks(metrics.trainer, counts_by_policy).items():
        filtered, pairs = counts.tolist()
        if pairs:
            metrics.rollout[metrics.name("filtered_agents", name)] = filtered / pairs


def keep_top_entropy(
    metrics: Metrics, batches: Mapping[str, PolicyBatch], entropies: Mapping[str, Tensor], fraction: float
) -> None:
    """Set the advantages of tokens with low entropy to 0, remove their teachers, and log the threshold.

    Args:
        metrics: metrics of the algorithm.
        batches: trajectories by policy.
        entropies: [B, T], entropies of the tokens by policy.
        fraction: fraction of a policy's tokens to keep.
    """
    sampled_here = {name: entropy[batches[name].action_mask] for name, entropy in entropies.items()}
    by_rank = gather_ranks(metrics.trainer, sampled_here)
    for name in metrics.policies:
        everywhere = torch.cat([torch.zeros(0), *(sampled[name] for sampled in by_rank if name in sampled)])
        if everywhere.numel():
            threshold = top_entropy_threshold(everywhere, fraction)
            metrics.rollout[metrics.name("entropy_threshold", name)] = threshold
        if everywhere.numel() and name in entropies:
            uncertain = entropies[name] >= threshold
            batches[name].advantages = batches[name].advantages * uncertain
            if batches[name].teacher_prompts is not None:
                batches[name].taught_tokens = uncertain


def normalize_tasks(
    metrics: Metrics,
    batches: Mapping[str, PolicyBatch],
    episodes: Sequence[Episode],
    environments: Sequence[str],
    chosen: TaskNormalization,
    warned: MutableSet[tuple[str, str]],
) -> None:
    """Bring the advantages of each task type to one scale, in place, and log the spread before it.

    Args:
        metrics: metrics of the algorithm.
        batches: trajectories by policy.
        episodes: episodes of the rollout.
        environments: names of the run's environments (the task types), in the same order on all ranks.
        chosen: scale of the advantages; see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.
        warned: (policy, environment) pairs without spread that a warning has named; this adds to them.
    """
    types = {name: task_types(rows.groups, episodes, environments) for name, rows in batches.items()}
    moments_here = {
        (policy, task): moments
        for policy, row_types in types.items()
        for task, moments in task_moments(batches[policy].advantages, batches[policy].action_mask, row_types).items()
    }
    totals = sum_over_ranks(metrics.trainer, moments_here)
    for policy in metrics.policies:
        moments = {task: totals[policy, task] for task in range(len(environments)) if (policy, task) in totals}
        if policy in types and chosen != "none":
            inputs = (batches[policy].advantages, batches[policy].action_mask, types[policy], moments)
            batches[policy].advantages = task_scaled_advantages(*inputs, center=chosen == "paper")
        moments = {task: spread for task, spread in moments.items() if spread.count}
        prefix = "" if len(metrics.policies) == 1 else f"{policy}/"
        for task, spread in moments.items():
            metrics.rollout[f"rollout/{environments[task]}/{prefix}advantage_std"] = spread.std
        flat = [environments[task] for task in unnormalizable_tasks(moments)] if chosen != "none" else []
        new = [name for name in flat if (policy, name) not in warned]
        if new:
            warned |= {(policy, name) for name in new}
            logger.warning(
                "the advantages of %s have no spread in this rollout, so task_normalization leaves them as they are "
                "(warned of once; see rollout/ENVIRONMENT/advantage_std)",
                ", ".join(new),
            )
