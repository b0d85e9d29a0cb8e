"""Losses of one policy as pure functions: one value per token (or pair), reduced over the global batch separately."""

from mrlm_pl.losses.clip import Clip
from mrlm_pl.losses.corrections import (
    Correction,
    RatioLevel,
    masked_importance_weight,
    truncated_importance_weight,
)
from mrlm_pl.losses.diagnostics import (
    approx_kl,
    clip_fraction,
    masked_max,
    masked_mean,
    mismatch,
    ratio_max_deviation,
)
from mrlm_pl.losses.kl import kl_k1, kl_k2, kl_k3, kl_k3_straight_through
from mrlm_pl.losses.masking import last_token_mask, masked_values
from mrlm_pl.losses.policy_gradient import cispo_loss, gspo_loss, policy_gradient_loss, ppo_clip_loss
from mrlm_pl.losses.preference import (
    PreferenceLoss,
    dpo_hinge_loss,
    dpo_sigmoid_loss,
    ipo_loss,
    joint_logp,
    preference_gap,
    preference_loss,
    sequence_logp,
)
from mrlm_pl.losses.reduction import (
    BatchTotals,
    Reduction,
    batch_totals,
    episode_token_counts,
    reduce_tokens,
    token_weights,
)
from mrlm_pl.losses.reward_model import bradley_terry_loss, correctness_loss
from mrlm_pl.losses.supervised import cross_entropy_loss
from mrlm_pl.losses.value import value_loss

__all__ = [
    "BatchTotals",
    "Clip",
    "Correction",
    "PreferenceLoss",
    "RatioLevel",
    "Reduction",
    "approx_kl",
    "batch_totals",
    "bradley_terry_loss",
    "cispo_loss",
    "clip_fraction",
    "correctness_loss",
    "cross_entropy_loss",
    "dpo_hinge_loss",
    "dpo_sigmoid_loss",
    "episode_token_counts",
    "gspo_loss",
    "ipo_loss",
    "joint_logp",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_straight_through",
    "last_token_mask",
    "masked_importance_weight",
    "masked_max",
    "masked_mean",
    "masked_values",
    "mismatch",
    "policy_gradient_loss",
    "ppo_clip_loss",
    "preference_gap",
    "preference_loss",
    "ratio_max_deviation",
    "reduce_tokens",
    "sequence_logp",
    "token_weights",
    "truncated_importance_weight",
    "value_loss",
]
