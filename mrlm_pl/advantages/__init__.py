"""Advantages of one policy as pure functions: per row [B] from rewards in groups, or per token [B, T]."""

from mrlm_pl.advantages.gae import broadcast_to_tokens, rewards_at_last_token, token_gae, transition_gae, turn_discounts
from mrlm_pl.advantages.groups import (
    discounted_returns,
    finite_rewards,
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_returns,
    remax_advantages,
    singleton_groups,
    step_normalized_advantages,
    zero_variance_groups,
)
from mrlm_pl.advantages.rae import role_conditioned_advantages
from mrlm_pl.advantages.task_normalization import (
    merge_task_moments,
    task_moments,
    task_scaled_advantages,
    task_standardized_advantages,
    unnormalizable_tasks,
)
from mrlm_pl.advantages.tree import (
    counterfactual_advantages,
    decision_returns,
    group_max_advantages,
    group_scaled_advantages,
    tree_returns,
)
from mrlm_pl.advantages.whitening import Moments, masked_moments, merge_gathered, whiten

__all__ = [
    "Moments",
    "broadcast_to_tokens",
    "counterfactual_advantages",
    "decision_returns",
    "discounted_returns",
    "finite_rewards",
    "group_centered_advantages",
    "group_max_advantages",
    "group_normalized_advantages",
    "group_scaled_advantages",
    "leave_one_out_advantages",
    "masked_moments",
    "merge_gathered",
    "merge_task_moments",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus_returns",
    "remax_advantages",
    "rewards_at_last_token",
    "role_conditioned_advantages",
    "singleton_groups",
    "step_normalized_advantages",
    "task_moments",
    "task_scaled_advantages",
    "task_standardized_advantages",
    "token_gae",
    "transition_gae",
    "tree_returns",
    "turn_discounts",
    "unnormalizable_tasks",
    "whiten",
    "zero_variance_groups",
]
