"""Group relative policy optimization, and its relatives that differ in the baseline, the clip or the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import (
    group_centred_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
)
from mrlm_pl.algorithms.base import Algorithm, LearningRateSchedule
from mrlm_pl.algorithms.group import GroupAdvantage, credited_rows
from mrlm_pl.batch import Batch, PolicyBatch
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import (
    Reduction,
    approx_kl,
    clip_fraction,
    kl_k3,
    kl_k3_straight_through,
    masked_mean,
    ppo_clip_loss,
    ratio_max_deviation,
    reduce_tokens,
)
from mrlm_pl.policy import Policy

ADVANTAGES: dict[str, GroupAdvantage] = {
    "group_normalized": group_normalized_advantages,
    "group_centred": group_centred_advantages,
    "leave_one_out": leave_one_out_advantages,
}
KL_ESTIMATORS = {"k3": kl_k3, "k3_straight_through": kl_k3_straight_through}


class GRPO(Algorithm):
    """Group relative policy optimization (arXiv 2402.03300).

    For the G episodes of a task with returns ``r_i``, mean ``m`` and standard deviation ``s``::

        A_i  = (r_i - m) / (s + 1e-6)
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) + beta KL_t )
        rho_t = pi(token_t) / pi_old(token_t),   KL_t = e^-d + d - 1 with d = log pi - log pi_ref

    Relatives: Dr.GRPO (2503.20783) is ``advantage: group_centred`` with ``reduction: constant_length``; RLOO
    (2402.14740) is ``advantage: leave_one_out``; DAPO (2503.14476) is ``clip_high: 0.28`` with
    ``zero_variance: exclude``.

    Logged for each policy under ``train/``: ``approx_kl`` (k3 between sampler and learner), ``clip_fraction``,
    ``ratio_deviation`` (largest ``|rho - 1|``), ``grad_norm``, and ``kl`` (k3 to the reference) when
    ``kl_coefficient`` is above 0.

    Args:
        policies, seats, schedule, warmup_steps, betas: see :class:`Algorithm`.
        advantage: how returns of a group become advantages.
        reduction: how token losses become one number; see :data:`mrlm_pl.losses.Reduction`.
        max_length: longest response in tokens, for ``reduction: constant_length``.
        clip_low, clip_high: how far the ratio may move before its gradient stops.
        dual_clip: bound ``c`` of the loss at negative advantages (1912.09729); None has no bound.
        kl_coefficient: ``beta``; 0 skips the reference model altogether.
        kl_estimator: ``k3``, or ``k3_straight_through`` with k2's (unbiased) gradient.
        zero_variance: groups whose returns are all equal have no gradient; ``keep`` counts their tokens in the
            reduction, ``exclude`` does not.
        recompute_old_logp: take pi_old from the learner at the time of sampling rather than from the sampler. None does
            so only where the sampler's numbers are not the learner's: truncated sampling or reduced precision.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        advantage: Literal["group_normalized", "group_centred", "leave_one_out"] = "group_normalized",
        reduction: Reduction = "token_mean",
        max_length: int | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        kl_coefficient: float = 0.0,
        kl_estimator: Literal["k3", "k3_straight_through"] = "k3",
        zero_variance: Literal["keep", "exclude"] = "keep",
        recompute_old_logp: bool | None = None,
    ) -> None:
        super().__init__(policies, seats, schedule, warmup_steps, betas)
        if advantage not in ADVANTAGES or kl_estimator not in KL_ESTIMATORS:
            raise ConfigurationError(
                f"advantage {advantage!r} must be one of {sorted(ADVANTAGES)} and kl_estimator {kl_estimator!r} "
                f"one of {sorted(KL_ESTIMATORS)}"
            )
        self.refuse_dropout()
        if kl_coefficient < 0 or not 0 < clip_low < 1 or clip_high <= 0 or (dual_clip is not None and dual_clip <= 1):
            raise ConfigurationError(
                f"kl_coefficient {kl_coefficient} must be 0 or above, clip_low {clip_low} between 0 and 1, "
                f"clip_high {clip_high} above 0, dual_clip {dual_clip} above 1"
            )
        if (reduction == "constant_length") != (max_length is not None):
            raise ConfigurationError(
                f"max_length is {max_length} with reduction {reduction!r}; it belongs to `reduction: constant_length`"
            )
        self.advantage, self.reduction, self.max_length = ADVANTAGES[advantage], reduction, max_length
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.kl_coefficient, self.kl_estimator = kl_coefficient, KL_ESTIMATORS[kl_estimator]
        self.zero_variance, self.recompute_old_logp = zero_variance, recompute_old_logp

    @property
    def uses_reference(self) -> bool:
        return self.kl_coefficient > 0

    def prepare(self, episodes: Sequence[Episode], sampling: Sampling) -> dict[str, PolicyBatch]:
        temperature = sampling.temperature or 1.0
        tables = credited_rows(episodes, self.advantage, dict.fromkeys(self.policies, temperature))
        trained = {name: rows.to(self.device) for name, rows in tables.items() if self.policy(name).trained}
        for name, rows in trained.items():
            policy = self.policy(name)
            if self.zero_variance == "exclude":
                rows.action_mask &= (rows.advantages != 0).any(-1, keepdim=True)  # type: ignore[union-attr]
            if self.uses_reference:
                rows.ref_logp = policy.reference_logprobs(**rows.inputs())
            if self.sampler_differs(sampling) if self.recompute_old_logp is None else self.recompute_old_logp:
                rows.proximal_logp = policy(**rows.inputs())
        return trained

    def rows_with_gradient(self, rows: PolicyBatch) -> Tensor:
        counted = rows.action_mask.any(-1)
        if not self.uses_reference and rows.advantages is not None:
            counted &= (rows.advantages != 0).any(-1)
        return counted.nonzero().flatten()

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        assert rows.advantages is not None
        mask, old_logp = rows.action_mask, rows.old_logp if rows.proximal_logp is None else rows.proximal_logp
        logp = self.policies[name](**rows.inputs())
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        losses = ppo_clip_loss(logp, old_logp, rows.advantages, mask, dual_clip=self.dual_clip, **clip)
        if rows.ref_logp is not None:
            losses = losses + self.kl_coefficient * self.kl_estimator(logp, rows.ref_logp, mask)
        with torch.no_grad():
            metrics = {
                "approx_kl": approx_kl(logp, rows.old_logp, mask),
                "clip_fraction": clip_fraction(logp, old_logp, rows.advantages, mask, **clip),
                "ratio_deviation": ratio_max_deviation(logp, old_logp, mask),
            }
            if rows.ref_logp is not None:
                metrics["kl"] = masked_mean(kl_k3(logp, rows.ref_logp, mask), mask)
        self.log_policy(name, metrics)
        return reduce_tokens(
            losses,
            mask,
            self.reduction,
            batch.totals[name],
            max_length=self.max_length,
            episode_tokens=rows.episode_tokens,
        )
