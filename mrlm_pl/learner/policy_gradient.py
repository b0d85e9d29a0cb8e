"""The base of the policy gradients: advantages of tokens, a token loss, its reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages.task_normalization import TaskNormalization
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError, source_line
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch, not_none
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.credit.filters import (
    exclude_zero_variance,
    keep_top_entropy,
    normalize_tasks,
    note_baselines,
    whiten_rows,
    with_greedy,
)
from mrlm_pl.learner.credit.returns import Batches, CreditParts, EpisodeCredit, check_advantages, equal_returns
from mrlm_pl.learner.credit.rules import BASELINES, R, check_takes
from mrlm_pl.learner.entropy import EntropyBonus
from mrlm_pl.learner.metrics import check_token_losses
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.learner.policies.distillation import Distillation, Distiller
from mrlm_pl.learner.policies.old import OldPolicy
from mrlm_pl.learner.policies.reference import KL, KLPenalty, Placement, ReferencePolicy, ReferenceSync
from mrlm_pl.losses import (
    Clip,
    Correction,
    Entropy,
    LossName,
    Reduction,
    masked_mean,
    reduce_tokens,
    token_loss,
)
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.logprobs import TokenOutputs
from mrlm_pl.rewards import TurnBonus, overlong_penalties
from mrlm_pl.settings import FractionAboveZero, NonNegativeInt, PositiveFloat

_NO_RULE = (
    "{} has no rule of advantages; override `advantages(returns)`, or set `advantage = staticmethod(RULE)`, such as "
    "mrlm_pl.advantages.group_normalized_advantages (docs/tutorials/own_algorithm.md)"
)


class PolicyGradient(Algorithm):
    """Base class of the policy gradients: a subclass defines how returns become advantages.

    A subclass sets :attr:`advantage`, or overrides :meth:`with_baselines` or :meth:`advantages`, and sets
    :attr:`default_loss`; its constructor may set :attr:`unit` and ``critic``. It overrides :meth:`returns` to compare
    something else, and :meth:`credit` or :meth:`token_losses` for other rules.

    Logged for each policy under ``train/``, as means over all action tokens of an update, on all ranks and in all
    micro-batches: ``approx_kl`` (k3 estimate of the KL divergence of the current policy from the old policy),
    ``ratio_deviation`` (largest ``|rho - 1|``), of losses with a ratio ``clip_fraction`` (fraction of tokens whose
    gradient the loss removes) and ``loss_weight`` (mean weight of a token's gradient, 1 where the current policy is the
    old one; see :meth:`mrlm_pl.losses.TokenLoss.with_weights`), ``grad_norm``, ``kl`` (k3 to the reference policy, if
    any), ``entropy`` (nats per token, with a bonus) and with a target its ``entropy_coefficient``, ``value_loss``
    (before its coefficient), and how far the learner is from the sampler: ``mismatch_k1``, ``mismatch_k3``,
    ``mismatch_chi_square``, ``mismatch_mean_ratio``, ``mismatch_effective_share``, ``mismatch_max_ratio`` (see
    :func:`mrlm_pl.losses.mismatch`), of the old policy where the learner computed it (``recompute_old_logp``), and of
    the current one otherwise. With a ``correction``, ``correction_weight`` is the mean of its weights. Once a rollout,
    with a reference policy, ``reference_kl`` (k1 in nats per token, the measure of the controller) and
    ``kl_coefficient``. ``early_stop`` is 1 where ``stop_at_kl`` ended the updates on a rollout.

    Trajectories without a gradient, whose advantage is 0, count in these means. After the first update on a rollout the
    current policy is evaluated on them in a pass without gradient. The first update on a synchronous rollout, where the
    current policy is the old one, needs that pass only if it takes the old policy from its own passes (see
    ``recompute_old_logp``). If the old policy is the sampler's, ``approx_kl``, ``ratio_deviation`` and
    ``mismatch_*`` of that update are means over the other trajectories.

    Args:
        policies, seats, optimization: see :class:`Algorithm`.
        loss: token loss, by name or as a function; see :func:`mrlm_pl.losses.token_loss`. None is the algorithm's
            default. ``reinforce`` has no importance ratio: a rollout then serves one update. A class whose
            :meth:`token_losses` replace it rejects it, ``loss_settings`` and ``clip``; see :attr:`uses_loss`.
        loss_settings: extra arguments of the loss, such as the temperatures of ``sapo``.
        clip: clipping range of the importance ratio; see :class:`mrlm_pl.losses.Clip`.
        reduction: reduction of the token losses to one number; see :data:`mrlm_pl.losses.Reduction`. None is that of
            the loss.
        max_length: longest response in tokens, for ``reduction: constant_length``.
        kl: penalty for the divergence from the reference policy; see :class:`~mrlm_pl.learner.policies.reference.KL`.
        entropy: entropy bonus; see :class:`mrlm_pl.losses.Entropy`.
        top_entropy: fraction of a policy's tokens in a rollout, those with the highest entropy on all ranks, that keep
            their advantage and teachers; the others count in the reduction alone (arXiv 2506.01939). Below 1 the
            learner computes the entropies once a rollout, and ``entropy_threshold`` is logged.
        stop_at_kl: an update whose mean ``approx_kl`` exceeds this is the last one on its rollout; None sets no limit.
        zero_variance: treatment of an agent whose returns are equal in all compared episodes of a task, and which thus
            has no gradient. ``keep`` counts its tokens in the reduction; ``exclude`` does not, and logs
            ``filtered_agents``, the fraction of excluded (task group, agent) pairs of a policy.
        recompute_old_logp: take pi_old from the learner at the time of sampling rather than from the sampler. None does
            so only where the sampler's numbers are not the learner's: truncated sampling or reduced precision. That
            costs a pass over the rollout, except where the rollout serves one update and there is neither a reference
            policy nor a teacher: the update then takes pi_old from its own pass.
        correction: correction of the policy's losses, not of the value losses, for the difference between learner and
            sampler; ``plain`` is decoupled PPO (arXiv 2505.24298); see :class:`mrlm_pl.losses.Correction`.
        off_policy_threshold: bound on the mean of ``log mu - log pi`` over a trajectory's tokens; above it, tokens with
            a negative advantage have no policy loss (DeepSeek-V3.2, arXiv 2512.02556). ``off_policy_masked`` is their
            fraction of all tokens. None sets no bound.
        overlong_buffer: width in tokens of the slope over which turns near ``max_tokens`` are penalized by up to 1
            (DAPO, arXiv 2503.14476); 0 has no penalty.
        task_normalization: scale of the advantages of each task type (environment) of a run with several, after the
            comparison within groups, by mean and standard deviation over its action tokens in the rollout of all ranks,
            for each policy. ``scale_only`` divides by the standard deviation, so that every environment has the same
            weight, whatever its rewards and lengths; ``paper`` also subtracts the mean (arXiv 2510.04206), which can
            flip signs; ``none`` leaves them. None is ``scale_only`` with several environments and ``none`` with one. A
            type whose advantages have no spread is left as it is, with a warning. Logged with several environments:
            ``rollout/ENVIRONMENT/advantage_std``, before it, with the policy's name if there are several.
        reference_sync: schedule by which the reference policy follows the policy; see
            :class:`~mrlm_pl.learner.policies.reference.ReferenceSync`.
        distillation: teachers that score the sampled tokens; see
            :class:`~mrlm_pl.learner.policies.distillation.Distillation`.

    Attributes:
        loss: token loss.
        whiten_advantages: whiten the advantages of trajectories over each policy's tokens.
        old_policy: source of pi_old, learner or sampler, and the correction for the policy that sampled.
        kl: KL penalty, with the current coefficient of each policy.
        entropy: entropy bonus, with the current weight of each policy.
        warned: names of the warnings already logged.

    Raises:
        ConfigurationError: an unknown name, a value out of range, an option that the class does not use, or a class
            without advantages, or whose rule takes other arguments; that of a class with its own constructor is
            checked by :meth:`check_rollouts`.
    """

    kl_placements: ClassVar[tuple[Placement, ...]] = ("loss",)
    """Places of the KL penalty, the default first; ``reward`` needs rewards of individual tokens."""

    advantage: Callable[[Tensor, Tensor], Tensor] | None = None
    """Returns advantages [N] from returns [N] and the numbers [N] of the groups in which they are compared."""

    whiten_advantages: bool = False

    default_loss: ClassVar[LossName] = "reinforce"
    """Loss of a token where ``loss`` names none."""

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        loss: LossName | Callable[..., Any] | None = None,
        loss_settings: dict[str, Any] | None = None,
        clip: Clip = Clip(),  # noqa: B008 (frozen)
        reduction: Reduction | None = None,
        max_length: int | None = None,
        kl: KL = KL(),  # noqa: B008 (frozen)
        entropy: Entropy = Entropy(),  # noqa: B008 (frozen)
        top_entropy: FractionAboveZero = 1.0,
        stop_at_kl: PositiveFloat | None = None,
        zero_variance: Literal["keep", "exclude"] = "keep",
        recompute_old_logp: bool | None = None,
        correction: Correction = Correction(),  # noqa: B008 (frozen)
        off_policy_threshold: PositiveFloat | None = None,
        overlong_buffer: NonNegativeInt = 0,
        task_normalization: TaskNormalization | None = None,
        reference_sync: ReferenceSync = ReferenceSync(),  # noqa: B008 (frozen)
        distillation: Distillation | None = None,
    ) -> None:
        super().__init__(policies, seats, optimization)
        self.check_no_dropout()
        changed = {"loss": loss is not None, "loss_settings": bool(loss_settings), "clip": clip != Clip()}
        if any(changed.values()) and not self.uses_loss:
            raise ConfigurationError(
                f"{type(self).__name__} does not use {', '.join(name for name in changed if changed[name])}: it has "
                "token_losses of its own; leave the option out, or set `uses_loss = True` in the class if its "
                "token_losses call super().token_losses or self.loss"
            )
        self.loss = token_loss(loss or self.default_loss, clip, loss_settings)
        self.reduction = reduction or self.loss.reduction
        if (self.reduction == "constant_length") != (max_length is not None):
            raise ConfigurationError(
                f"max_length is {max_length} with reduction {self.reduction!r}; "
                "it belongs to `reduction: constant_length`"
            )
        kl = replace(kl, placement=kl.placement or self.kl_placements[0])
        if kl.coefficient and kl.placement not in self.kl_placements:
            raise ConfigurationError(
                f"kl.placement is {kl.placement!r}, but {type(self).__name__} has no rewards of individual tokens; "
                f"set it to {' or '.join(self.kl_placements)}"
            )
        self.kl = KLPenalty(kl, list(self.policies))
        self.reference = ReferencePolicy(kl.coefficient > 0, reference_sync)
        self.max_length = max_length
        self.entropy = EntropyBonus(entropy, list(self.policies))
        self.stop_at_kl, self.top_entropy = stop_at_kl, top_entropy
        self.zero_variance, self.overlong_buffer = zero_variance, overlong_buffer
        self.old_policy = OldPolicy(recompute_old_logp, correction, off_policy_threshold)
        self.task_normalization: TaskNormalization | None = task_normalization
        self.distiller = None if distillation is None else Distiller(distillation, self)
        self.warned: set[Any] = set()
        if type(self).__init__ is PolicyGradient.__init__:  # another one may set the advantages
            self._check_credit()

    @property
    def uses_importance_ratio(self) -> bool:
        return self.loss.uses_ratio

    @property
    def uses_loss(self) -> bool:
        """True unless the class has token losses of its own; it sets ``uses_loss = True`` if they call these."""
        return not self._overrides("token_losses")

    @property
    def divides_groups(self) -> bool:
        """True unless the class has its own loss; it sets ``divides_groups = True`` if that compares no rows."""
        return not self._overrides("token_losses", "policy_loss")

    def _overrides(self, *methods: str) -> bool:
        return any(getattr(type(self), name) is not getattr(PolicyGradient, name) for name in methods)

    def _check_credit(self) -> None:
        """Raise :class:`ConfigurationError` if no rule makes advantages of returns, or a method cannot be called so."""
        overrides = self._overrides("returns", "advantages", "with_baselines", "credit", "trained_rows", "prepare")
        if not (overrides or self.unit.has_rule or self.advantage or self.uses_greedy_baseline):
            raise ConfigurationError(_NO_RULE.format(type(self).__name__))
        if not self._overrides("credit"):  # another one may call them otherwise
            rules = [name for name in ("advantages", "with_baselines") if self._overrides(name)]
            if rules and type(self.unit).credit is not EpisodeCredit.credit:
                fault = f"{type(self).__name__} has {' and '.join(rules)}, which {type(self.unit).__name__} never calls"
                raise ConfigurationError(
                    f"{fault}; set `self.unit` in the constructor, as to mrlm_pl.learner.credit.returns.EpisodeCredit()"
                )
            if self.advantage is not None and not self._overrides("advantages"):
                check_takes(self.advantage, "rewards", "groups")
            check_takes(self.advantages, "returns")
            check_takes(self.returns, "episodes", "bonus", "greedy")
        if self.reduction == "episode_mean" and self.unit.of_decisions:
            raise ConfigurationError(
                "reduction is 'episode_mean', but rows of single decisions are not episodes; use sequence_mean"
            )
        if self.zero_variance == "exclude" and not (self.unit.compares and self.critic is None):
            raise ConfigurationError(
                f"zero_variance is exclude, but {type(self).__name__} does not compare the episodes of a task with "
                "each other and also learns from equal returns; set it to keep"
            )

    def check_rollouts(self, rollouts: RolloutFacts) -> None:
        self._check_credit()
        super().check_rollouts(rollouts)
        if self.distiller is not None:
            self.distiller.check_rollouts(rollouts.agents, rollouts.environments)

    def turn_bonus(self, sampling: Sampling) -> Callable[[Turn], float] | None:
        """Return the function that adds to the reward of a turn, or None.

        Raises:
            ConfigurationError: ``overlong_buffer`` is wider than a turn may be long.
        """
        if not self.overlong_buffer:
            return None
        limits = {name: sampling.of(name).max_tokens for name in self.policies}
        return overlong_penalties(limits, sampling.max_tokens, self.overlong_buffer)

    def weighs_sampler(self, sampling: Sampling) -> bool:
        corrected = self.old_policy.correction.kind != "none"
        return corrected or (self.uses_importance_ratio and not self.recomputes(sampling))

    @property
    def credit_needs_weights_for(self) -> str | None:
        """Part of the credit that models compute; None if advantages follow from the episodes alone."""
        parts = {
            "a critic": self.critic is not None,
            "`kl.placement: reward`": self.reference.used and self.kl.settings.placement == "reward",
            "`top_entropy`": self.top_entropy < 1,
            "`distillation`": self.distiller is not None,
        }
        return next((part for part, used in parts.items() if used), None)

    # From the episodes of a rollout to rows with advantages, in the order of the calls.

    def prepare(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()) -> Batches:
        self.collection_over = False
        # The only update on a rollout can take pi_old from its own forward pass, unless something reads pi_old earlier.
        overrides = self._overrides("prepare", "policy_loss", "measure_without_gradient")
        own_pass = self.rollouts.updates == 1 and not (self.reference.used or self.distiller or overrides)
        episodes = self.rewarded(episodes)
        trained = self.trained_rows(episodes, sampling, greedy)
        if self.uses_greedy_baseline:  # only now, because `trained_rows` counts the others
            episodes = with_greedy(episodes, greedy)
        students = {name: rows for name, rows in trained.items() if name in self.policies}
        for name, rows in students.items():
            self._add_logprobs(name, rows, sampling, own_pass)
        self.old_policy.is_current = own_pass and self.recomputes(sampling)
        if self.reference.used:
            self.kl.steer(self.metrics, list(self.trained_policies), students, episodes)
        if self.distiller is not None:
            self.distiller.prepare(students, episodes)
        if self.top_entropy < 1:
            entropies: dict[str, Any] = {
                name: not_none(self.policy(name).outputs(rows.inputs(), with_entropy=True).entropy).cpu()
                for name, rows in students.items()
            }
            keep_top_entropy(self.metrics, students, entropies, self.top_entropy)
        return trained

    def rewarded(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Return the episodes of a rollout with the rewards and actions that are trained; every rank calls it once."""
        return episodes

    def trained_rows(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()) -> Batches:
        """Return the rows of :meth:`prepare` with advantages alone; see :attr:`credit_needs_weights_for`."""
        if self.uses_greedy_baseline:
            note_baselines(self.metrics, episodes, greedy, self.turn_bonus(sampling))
            episodes = with_greedy(episodes, greedy)
        batches = self.credit(episodes, sampling, greedy)
        frozen = self.policies.keys() - self.trained_policies.keys()
        trained = {name: rows for name, rows in batches.items() if name not in frozen}
        students = {name: rows for name, rows in trained.items() if name in self.policies}
        if self.zero_variance == "exclude":  # whitened, the advantages of equal returns would not be 0
            exclude_zero_variance(self.metrics, students)
        if self.whiten_advantages:
            whiten_rows(self.trainer, students)
        names = tuple(self.rollouts.environments)
        chosen = self.task_normalization or ("scale_only" if len(names) > 1 else "none")
        if len(names) > 1 or (names and chosen != "none"):
            normalize_tasks(self.metrics, students, episodes, names, chosen, self.warned)
        return trained

    def credit(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]) -> Batches:
        """Return the trajectories of every learner, a policy's with their advantages; see :meth:`prepare`."""
        returns = self.returns(episodes, self.turn_bonus(sampling), greedy)
        self.unit.warn(episodes, self.warned)
        trained, penalty = list(self.trained_policies), partial(self._penalty, sampling)
        parts: CreditParts[Any] = CreditParts(self.metrics, self._with_advantages, trained, penalty, self.critic)
        return self.unit.credit(returns, parts)

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]) -> Any:
        """Return the returns that are compared, of agents in episodes, of turns or of decisions.

        Args:
            episodes: one rollout, or one group of it.
            bonus: function that returns a bonus for a turn, added to the environment's reward; None adds nothing.
            greedy: one greedy episode for each group, if they are played.
        """
        return self.unit.returns(episodes, bonus, greedy)

    def _with_advantages(self, returns: R) -> tuple[R, Tensor]:
        """Return :meth:`with_baselines`, and the advantages [N].

        Raises:
            ConfigurationError: the advantages are not one finite number for each return, or a subclass returned
                something else than returns with baselines, or baselines that the rule of the unit ignores.
        """
        compared = self.with_baselines(returns)
        if not isinstance(compared, type(returns)):
            raise ConfigurationError(
                f"{self.with_baselines.__qualname__} returned a {type(compared).__name__}; it must return "
                f"`dataclasses.replace(returns, baseline=...)` ({source_line(self.with_baselines)})"
            )
        if self.unit.has_rule and self._overrides("with_baselines") and not self._overrides("advantages"):
            self.unit.check_compared(compared, self.with_baselines)
        advantages = check_advantages(self.advantages(compared), len(compared.comparison), self.advantages)
        if self.unit.has_rule and self._overrides("advantages"):  # which does not subtract the unit's baselines
            compared = replace(compared, baseline=None)  # type: ignore[type-var]
        return compared, advantages

    def with_baselines(self, returns: Any) -> Any:
        """Return the returns with their baselines, by default those of :attr:`advantage`; every rank calls this once.

        Records of the episodes keep both. Without a known rule there are no baselines; if a subclass overrides
        :meth:`advantages`, the records have none.

        Args:
            returns: :class:`~mrlm_pl.learner.credit.returns.Returns` of agents in episodes,
                :class:`~mrlm_pl.learner.credit.turns.TurnReturns` of turns, or
                :class:`~mrlm_pl.learner.credit.decisions.DecisionReturns` of decisions.
        """
        if self.unit.has_rule:
            return self.unit.with_baselines(returns)
        if self.uses_greedy_baseline:
            return replace(returns, baseline=returns.greedy)
        for advantage, baselines in BASELINES.items():
            if advantage is self.advantage and not self._overrides("advantages"):
                return replace(returns, baseline=baselines(returns.returns, returns.comparison))
        return returns

    def advantages(self, returns: Any) -> Tensor:
        """Return the advantages [N] of returns; every rank calls this.

        By default these are :attr:`advantage` of the returns, or without one the returns minus their baselines.

        Args:
            returns: value of :meth:`with_baselines`.
        """
        if self.unit.has_rule or (self.advantage is None and returns.baseline is not None):
            return self.unit.advantages(returns)
        if self.advantage is None:
            raise ConfigurationError(_NO_RULE.format(type(self).__name__))
        advantages = self.advantage(returns.returns, returns.comparison)
        return check_advantages(advantages, len(returns.returns), self.advantage)

    def _penalty(self, sampling: Sampling, name: str, rows: PolicyBatch) -> Tensor | float:
        """Return the KL penalty [B, T] in the rewards of a policy's rows, which have its log-probabilities then."""
        if not self.reference.used or self.kl.settings.placement != "reward":
            return 0.0
        self._add_logprobs(name, rows, sampling)
        return self.kl.of_rewards(name, rows)

    def _add_logprobs(self, name: str, rows: PolicyBatch, sampling: Sampling, own_pass: bool = False) -> None:
        """Set the temperature, and add the log-probabilities of the old and the reference policy that are used.

        With ``own_pass`` the update takes the learner's log-probabilities from its own pass.
        """
        policy = self.policy(name)
        rows.temperature = torch.full_like(rows.temperature, sampling.of(name).temperature or 1.0)
        if self.reference.used and rows.ref_logp is None:
            rows.ref_logp = policy.reference_logprobs(rows.inputs()).cpu()
        if rows.proximal_logp is None and not own_pass and self.recomputes(sampling):
            rows.proximal_logp = policy(rows.inputs()).cpu()

    def recomputes(self, sampling: Sampling) -> bool:
        """Return whether pi_old is the learner's at the time of sampling rather than the sampler's."""
        samplings = {name: sampling.of(name) for name in self.trained_policies}
        return self.old_policy.recomputes(samplings, self.trainer.precision, self.rollouts.engine)

    # Groups that carry no learning signal.

    def lacks_signal(self, group: Sequence[Episode]) -> bool:
        if not (group and self.unit.compares and self.critic is None):  # their rewards may be the team's
            return equal_returns(group)
        trained, (returns, signal) = self.trained_policies, self.signal(group)
        pairs = zip(returns.policies, signal.tolist(), strict=True)
        return not any(value for policy, value in pairs if policy in trained)

    def signal(self, group: Sequence[Episode]) -> tuple[Any, Tensor]:
        """Return the returns [N] of a group, without bonuses, and numbers [N] that are 0 without a learning signal."""
        returns = self.returns(group, None, ())
        if self.unit.has_rule:
            return returns, self.unit.advantages(returns)
        comparisons = returns.comparison.tolist()
        values = grouped(zip(comparisons, returns.returns.tolist(), strict=True))
        return returns, torch.tensor([len({*values[comparison]}) > 1 for comparison in comparisons])

    # From rows to losses.

    def rows_with_gradient(self, rows: PolicyBatch) -> Tensor:
        with_gradient = rows.action_mask.any(-1)
        if rows.teacher_prompts is None and not self._trains_zero_advantages(rows):
            with_gradient &= (rows.advantages != 0).any(-1)
        return with_gradient.nonzero().flatten()

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        if self.critic is not None and name not in self.policies:
            loss, metrics = self.critic.loss(name, rows, batch.totals[name])
            self.metrics.add_means(name, metrics, rows.action_mask.sum())
            return loss
        mask = rows.action_mask
        logp, entropy, values, taught = self._outputs(name, rows, batch)
        if self.old_policy.is_current:
            rows = replace(rows, proximal_logp=logp.detach())
        losses, metrics = self._corrected_losses(logp, rows)
        if self.critic is not None and rows.values is not None:
            value_losses = self.critic.value_losses(self.critic.model_for(name, ""), values, rows)
            losses = losses + self.critic.coefficient * value_losses
            metrics["value_loss"] = masked_mean(value_losses.detach(), mask)
        if entropy is not None:
            losses = losses + self.entropy.of_losses(name, entropy)
            metrics["entropy"] = masked_mean(entropy, mask)
        if self.distiller is not None and taught is not None:
            losses = losses + self.distiller.loss(name, taught)
        if rows.ref_logp is not None and self.kl.settings.placement == "loss":
            losses = losses + self.kl.of_losses(name, logp, rows)
        self.metrics.add_means(name, metrics, mask.sum())
        self.metrics.add_divergences(name, logp, rows, entropy)
        totals, lengths = batch.totals[name], rows.episode_tokens
        return reduce_tokens(losses, mask, self.reduction, totals, max_length=self.max_length, episode_tokens=lengths)

    def _outputs(self, name: str, rows: PolicyBatch, batch: Batch) -> TokenOutputs:
        """Return log-probabilities, entropies if they have a weight, values of a value head, and divergences."""
        teaching = None
        if self.distiller is not None:
            alone = not self._trains_zero_advantages(rows) and not bool(rows.layout.advantages.any())
            teaching = self.distiller.teaching(name, rows, batch.totals[name], alone)
        if teaching is None and not self.entropy.used and not self._trains_values(rows):
            return TokenOutputs(self.policies[name](rows.inputs()), None, None)
        options: dict[str, Any] = {"with_entropy": self.entropy.used, "teaching": teaching}
        return self.policy(name).outputs(rows.inputs(), **options)

    def _corrected_losses(self, logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the token losses [B, T] with the correction for the sampler, and their metrics."""
        returned = self.token_losses(logp, rows.old_logp, rows)
        losses, metrics = check_token_losses(returned, logp, self.token_losses)
        if self.old_policy.corrects:
            losses, correction_metrics = self.old_policy.corrected(losses, logp, rows)
            metrics |= correction_metrics
        return losses, metrics

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [B, T] of each token, and metrics by name: single numbers, means over the action tokens.

        By default :attr:`loss`, and with a ratio ``clip_fraction`` and ``loss_weight``.
        """
        inputs = (logp, old_logp, rows.advantages, rows.action_mask)
        if not self.loss.uses_ratio:
            return self.loss(*inputs), {}
        (losses, weights), mask = self.loss.with_weights(*inputs), rows.action_mask
        return losses, {"clip_fraction": masked_mean(weights == 0, mask), "loss_weight": masked_mean(weights, mask)}

    def _trains_values(self, rows: PolicyBatch) -> bool:
        """Return whether the value loss is part of the token losses of a policy's rows."""
        return self.critic is not None and rows.values is not None

    def _trains_zero_advantages(self, rows: PolicyBatch) -> bool:
        """Return whether rows may have a gradient, other than the teachers', where their advantages are 0."""
        own = self.loss.own or self._overrides("token_losses", "policy_loss")
        return own or self.reference.used or self.entropy.used or self._trains_values(rows)

    def measure_without_gradient(self, name: str, rows: PolicyBatch, batch: Batch) -> None:
        logp = self.policies[name](rows.inputs()) if self.evaluates_without_gradient(batch) else rows.proximal_logp
        if self.old_policy.is_current:
            rows = replace(rows, proximal_logp=logp)
        _, metrics = self._corrected_losses(rows.old_logp, rows)  # an advantage of 0 is never clipped
        self.metrics.add_means(name, metrics, rows.action_mask.sum())
        if logp is None:
            self.metrics.add_tokens(name, rows.old_logp, rows)
        else:
            self.metrics.add_divergences(name, logp, rows)

    def evaluates_without_gradient(self, batch: Batch) -> bool:
        return self.old_policy.is_current or not batch.on_policy

    # Between updates.

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        super().end_update(optimizer)
        self.entropy.steer(self.metrics)
        if self.stop_at_kl is not None:
            moved = [self.metrics.update.get(self.metrics.name("approx_kl", name), 0.0) for name in self.policies]
            before, self.collection_over = self.collection_over, self.collection_over or max(moved) > self.stop_at_kl
            self.metrics.log({"train/early_stop": float(self.collection_over and not before)})

    def progress(self) -> dict[str, Any]:
        return {
            "kl_coefficients": dict(self.kl.coefficients),
            "entropy_coefficients": dict(self.entropy.weights),
            "collection_over": self.collection_over,
            "old_policy_is_current": self.old_policy.is_current,
        }

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        self.kl.load(progress.get("kl_coefficients", {}))
        self.entropy.load(progress.get("entropy_coefficients", {}))
        self.collection_over = progress.get("collection_over", False)
        self.old_policy.is_current = progress.get("old_policy_is_current", False)
