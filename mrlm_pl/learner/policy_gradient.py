"""What the critic-free policy gradients share: one advantage for each token, a token loss, a reduction."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import Moments, masked_moments, whiten
from mrlm_pl.advantages.task_normalization import unnormalizable_tasks
from mrlm_pl.engines import Reference
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.algorithm import Algorithm, LearningRateSchedule
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.credit.groups import GroupAdvantage, credited_rows
from mrlm_pl.learner.credit.task_types import NORMALIZATIONS, TaskNormalization, label_task_types, moments_by_task
from mrlm_pl.learner.ranks import merged
from mrlm_pl.learner.reference import ReferencePolicy
from mrlm_pl.losses import (
    Correction,
    Reduction,
    kl_k3,
    kl_k3_straight_through,
    masked_mean,
    reduce_tokens,
)
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import overlong_penalty
from mrlm_pl.settings import as_settings

logger = logging.getLogger(__name__)

KL_ESTIMATORS = {"k3": kl_k3, "k3_straight_through": kl_k3_straight_through}
KLEstimator = Literal["k3", "k3_straight_through"]


class PolicyGradient(Algorithm):
    """Base of the policy gradients without a critic; a subclass adds :meth:`credit` and :meth:`token_losses`.

    Logged for each policy under ``train/``, as means over all action tokens of an update, on all ranks and in all
    micro-batches: ``approx_kl`` (k3 estimate of the KL divergence of the current policy from the old policy),
    ``ratio_deviation`` (largest ``|rho - 1|``), ``grad_norm``, ``kl`` (k3 to the reference, when ``kl_coefficient`` is
    above 0), and how far the learner is from the sampler: ``mismatch_k1``, ``mismatch_k3``, ``mismatch_chi_square``,
    ``mismatch_mean_ratio``, ``mismatch_effective_share``, ``mismatch_max_ratio`` (see
    :func:`mrlm_pl.losses.mismatch`), of the old policy where the learner computed it (``recompute_old_logp``), and of
    the current one otherwise. With a ``correction``, ``correction_weight`` is the mean of its weights.

    Trajectories without a gradient, whose advantage is 0, count in these means. After the first update on a rollout the
    current policy is evaluated on them in a pass without gradient. The first update on a synchronous rollout skips that
    pass: there the current policy is the old one. Where the old policy is the sampler's too, ``approx_kl``,
    ``ratio_deviation`` and ``mismatch_*`` are then means over the other trajectories.

    Args:
        policies, seats, schedule, warmup_steps, betas: see :class:`Algorithm`.
        reduction: how token losses become one number; see :data:`mrlm_pl.losses.Reduction`.
        max_length: longest response in tokens, for ``reduction: constant_length``.
        kl_coefficient: weight of the divergence from the reference; 0 skips the reference model altogether.
        kl_estimator: ``k3``, or ``k3_straight_through`` with k2's (unbiased) gradient.
        zero_variance: a task whose episodes give an agent no advantage, as its returns are all equal, has no gradient
            for that agent, whatever it has for others. ``keep`` counts the agent's tokens in the reduction, ``exclude``
            does not and logs ``filtered_agents``: the share of a policy's (task group, agent) pairs that it left out.
        recompute_old_logp: take pi_old from the learner at the time of sampling rather than from the sampler. None does
            so only where the sampler's numbers are not the learner's: truncated sampling or reduced precision.
        correction: weight of the losses for the difference between the two; see :class:`mrlm_pl.losses.Correction`.
        overlong_buffer: width in tokens of the slope by which turns that come near ``max_tokens`` are punished by up to
            1 (DAPO, arXiv 2503.14476); 0 does not punish them.
        task_normalization: what is made of the advantages of each task type (environment) of a run with several, after
            the comparison within groups, by mean and standard deviation over its action tokens in the collection of all
            ranks, for each policy. ``scale_only`` divides by the standard deviation, so that every environment pulls
            alike whatever its rewards and lengths are; ``paper`` also takes the mean off (arXiv 2510.04206), which can
            turn signs round; ``none`` leaves them. None is ``scale_only`` with several environments and ``none`` with
            one. A type whose advantages have no spread is left as it is, with a warning. Logged with several
            environments: ``rollout/ENVIRONMENT/advantage_std``, before it, with the policy's name if there are several.
        reference: what holds the reference model and computes with it, such as ``RayReference``; None: this process.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        reduction: Reduction = "token_mean",
        max_length: int | None = None,
        kl_coefficient: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        zero_variance: Literal["keep", "exclude"] = "keep",
        recompute_old_logp: bool | None = None,
        correction: Correction = Correction(),  # noqa: B008 (frozen)
        overlong_buffer: int = 0,
        task_normalization: TaskNormalization | None = None,
        reference: Reference | None = None,
    ) -> None:
        super().__init__(policies, seats, schedule, warmup_steps, betas)
        self.refuse_dropout()
        if kl_estimator not in KL_ESTIMATORS:
            raise ConfigurationError(f"kl_estimator {kl_estimator!r} must be one of {sorted(KL_ESTIMATORS)}")
        if kl_coefficient < 0 or overlong_buffer < 0:
            raise ConfigurationError(
                f"kl_coefficient {kl_coefficient} and overlong_buffer {overlong_buffer} must be 0 or above"
            )
        if task_normalization is not None and task_normalization not in NORMALIZATIONS:
            raise ConfigurationError(
                f"task_normalization {task_normalization!r} must be one of {sorted(NORMALIZATIONS)}"
            )
        if (reduction == "constant_length") != (max_length is not None):
            raise ConfigurationError(
                f"max_length is {max_length} with reduction {reduction!r}; it belongs to `reduction: constant_length`"
            )
        self.reduction, self.max_length = reduction, max_length
        self.kl_coefficient, self.kl_estimator = kl_coefficient, KL_ESTIMATORS[kl_estimator]
        correction = as_settings(Correction, correction, "correction")
        self.zero_variance, self.correction, self.overlong_buffer = zero_variance, correction, overlong_buffer
        self.recompute_old_logp = correction.recomputes(recompute_old_logp)
        self.task_normalization: TaskNormalization | None = task_normalization
        self._told_of: set[tuple[str, str]] = set()
        self.reference = ReferencePolicy(kl_coefficient > 0, reference)

    @abstractmethod
    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        """Rows of every learner, a policy's with their advantages; the arguments are those of :meth:`prepare`."""

    @abstractmethod
    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [B, T] of each token, and what else is to be logged."""

    def group_credit(
        self, episodes: Sequence[Episode], sampling: Sampling, advantage: GroupAdvantage
    ) -> dict[str, PolicyBatch]:
        """Return rows whose tokens all have their episode's advantage.

        See :func:`mrlm_pl.learner.credit.groups.credited_rows`.
        """
        temperature = dict.fromkeys(self.policies, sampling.temperature or 1.0)
        return credited_rows(episodes, advantage, temperature, self.turn_bonus(sampling))

    def whiten(self, rows: Mapping[str, PolicyBatch]) -> None:
        """Whiten each trained policy's advantages over its tokens on all ranks, in place; every rank must call this."""
        own: dict[str, Moments] = {}
        for name in self.policies:
            if name in rows and self.policy(name).trained:
                advantages = rows[name].advantages
                assert advantages is not None
                own[name] = masked_moments(advantages, rows[name].action_mask)
        moments = merged(self.trainer, own)
        for name in own:
            advantages = rows[name].advantages
            assert advantages is not None
            rows[name].advantages = whiten(advantages, rows[name].action_mask, moments[name])

    def turn_bonus(self, sampling: Sampling) -> Callable[[Turn], float] | None:
        """What is added to a turn's reward, or None.

        Raises:
            ConfigurationError: ``overlong_buffer`` is wider than a turn may be long.
        """
        if not self.overlong_buffer:
            return None
        limit, buffer = sampling.max_tokens, self.overlong_buffer
        overlong_penalty(0, limit, buffer)  # a buffer that does not fit is told now, not after a collection
        return lambda turn: overlong_penalty(turn.stop - turn.start, limit, buffer)

    def prepare(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()
    ) -> dict[str, PolicyBatch]:
        tables = self.credit(episodes, sampling, greedy)
        trained = {name: rows.to(self.device) for name, rows in tables.items() if self.learners[name].trained}
        if self.zero_variance == "exclude":
            self._exclude_without_advantage(trained)
        self._normalize_tasks(trained, episodes)
        for name, rows in trained.items():
            if name not in self.policies:
                continue  # a critic's rows come with all that its loss needs
            policy = self.policy(name)
            if self.reference.used and rows.ref_logp is None:
                rows.ref_logp = self.reference.logprobs(policy, rows, self.trainer)
            if rows.proximal_logp is None and self.recomputes(sampling):
                rows.proximal_logp = policy(**rows.inputs())
        return trained

    def _exclude_without_advantage(self, tables: Mapping[str, PolicyBatch]) -> None:
        """Take the (group, agent) pairs of which no row has an advantage out of the loss; every rank must call this."""
        own: dict[tuple[str, str], int] = {}
        for name, rows in tables.items():
            if name not in self.policies:
                continue
            assert rows.advantages is not None
            useful = (rows.advantages != 0).any(-1)
            kept = torch.isin(rows.comparisons, rows.comparisons[useful])
            rows.action_mask &= kept[:, None]
            pairs, used = len(rows.comparisons.unique()), len(rows.comparisons[useful].unique())
            own |= {(name, "filtered"): pairs - used, (name, "pairs"): pairs}
        totals = merged(self.trainer, own)
        for name in self.policies:
            if totals.get((name, "pairs")):
                share = totals[name, "filtered"] / totals[name, "pairs"]
                self.metrics.rollout[self.metrics.name("filtered_agents", name)] = share

    def _normalize_tasks(self, tables: Mapping[str, PolicyBatch], episodes: Sequence[Episode]) -> None:
        """Bring the advantages of each task type to one scale, in place; every rank must call this."""
        names = self.tasks_of_run
        chosen = self.task_normalization or ("scale_only" if len(names) > 1 else "none")
        if not names or (len(names) == 1 and chosen == "none"):
            return
        label_task_types(tables, episodes, names)
        own = {
            (policy, task): moments
            for policy in self.policies
            if policy in tables
            for task, moments in moments_by_task(tables[policy]).items()
        }
        totals = merged(self.trainer, own)
        for policy in self.policies:
            moments = {task: totals[policy, task] for task in range(len(names)) if (policy, task) in totals}
            if policy in tables:
                NORMALIZATIONS[chosen](tables[policy], moments)
            part = "" if len(self.policies) == 1 else f"{policy}/"
            for task, of_task in moments.items():
                self.metrics.rollout[f"rollout/{names[task]}/{part}advantage_std"] = of_task.std
            flat = [names[task] for task in unnormalizable_tasks(moments)] if chosen != "none" else []
            new = [name for name in flat if (policy, name) not in self._told_of]
            if new:
                self._told_of |= {(policy, name) for name in new}
                logger.warning(
                    "the advantages of %s have no spread in this collection, so task_normalization leaves them as they "
                    "are (told once for each; look at rollout/ENVIRONMENT/advantage_std)",
                    ", ".join(new),
                )

    def recomputes(self, sampling: Sampling) -> bool:
        """Whether pi_old is the learner's at the time of sampling rather than the sampler's."""
        return self.sampler_differs(sampling) if self.recompute_old_logp is None else self.recompute_old_logp

    def reads_sampler_logprobs(self, sampling: Sampling) -> bool:
        return not self.recomputes(sampling) or self.correction.kind != "none"

    def weighs_sampler(self, sampling: Sampling) -> bool:
        return self.correction.kind != "none" or (self.uses_importance_ratio and not self.recomputes(sampling))

    def rows_with_gradient(self, rows: PolicyBatch) -> Tensor:
        counted = rows.action_mask.any(-1)
        if not self.reference.used and rows.advantages is not None:
            counted &= (rows.advantages != 0).any(-1)
        return counted.nonzero().flatten()

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        assert rows.advantages is not None
        mask, old_logp = rows.action_mask, rows.old_logp
        logp = self.policies[name](**rows.inputs())
        losses, metrics = self.token_losses(logp, old_logp, rows)
        if self.correction.kind != "none":
            weights = self.correction.weights(old_logp, rows.behavior_logp, mask)
            losses = losses * weights
            metrics["correction_weight"] = masked_mean(weights, mask)
        if rows.ref_logp is not None and self.kl_coefficient:
            losses = losses + self._reference_losses(logp, rows)
        self.metrics.add_policy(name, metrics, mask.sum())
        self.metrics.add_divergences(name, logp, rows)
        return reduce_tokens(
            losses,
            mask,
            self.reduction,
            batch.totals[name],
            max_length=self.max_length,
            episode_tokens=rows.episode_tokens,
        )

    def note_without_gradient(self, name: str, rows: PolicyBatch, batch: Batch) -> None:
        old_logp, mask = rows.old_logp, rows.action_mask
        _, metrics = self.token_losses(old_logp, old_logp, rows)  # an advantage of 0 is never clipped
        if self.correction.kind != "none":
            weights = self.correction.weights(old_logp, rows.behavior_logp, mask)
            metrics["correction_weight"] = masked_mean(weights, mask)
        self.metrics.add_policy(name, metrics, mask.sum())
        if not batch.on_policy:
            self.metrics.add_divergences(name, self.policies[name](**rows.inputs()), rows)
        elif rows.proximal_logp is not None:
            self.metrics.add_divergences(name, rows.proximal_logp, rows)

    def _reference_losses(self, logp: Tensor, rows: PolicyBatch) -> Tensor:
        assert rows.ref_logp is not None
        return self.kl_coefficient * self.kl_estimator(logp, rows.ref_logp, rows.action_mask)
