"""Advantages of one policy as pure functions: per row [B] from rewards in groups, or per token [B, T]."""

from mrlm_pl.advantages.gae import token_gae, transition_gae, turn_discounts
from mrlm_pl.advantages.groups import (
    finite_rewards,
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    remax_advantages,
    step_normalized_advantages,
)
from mrlm_pl.advantages.rae import role_conditioned_advantages
from mrlm_pl.advantages.task_normalization import (
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
from mrlm_pl.advantages.whitening import NO_MOMENTS, Moments, masked_moments, whiten

__all__ = [
    "NO_MOMENTS",
    "Moments",
    "counterfactual_advantages",
    "decision_returns",
    "finite_rewards",
    "group_centered_advantages",
    "group_max_advantages",
    "group_normalized_advantages",
    "group_scaled_advantages",
    "leave_one_out_advantages",
    "masked_moments",
    "remax_advantages",
    "role_conditioned_advantages",
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
]
