"""Proximal policy optimization with a value estimate for every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mrlm_pl.advantages import whiten
from mrlm_pl.engines import Reference
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.algorithm import Algorithm, LearningRateSchedule
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.credit.turns import DiscountUnit, RewardedRows, discounts_of, rewarded_rows
from mrlm_pl.learner.critics import check_critic, check_reads, check_window, critic_groups, value_group
from mrlm_pl.learner.kl_controller import KLController
from mrlm_pl.learner.ranks import merged
from mrlm_pl.learner.reference import ReferencePolicy
from mrlm_pl.losses import (
    Correction,
    Reduction,
    clip_fraction,
    kl_k1,
    kl_k3,
    masked_mean,
    ppo_clip_loss,
    reduce_tokens,
    value_loss,
)
from mrlm_pl.policy import Policy


class PPO(Algorithm):
    """Proximal policy optimization (arXiv 1707.06347), token by token, with generalized advantages (1506.02438).

    ``V_t`` is the value before token t, ``t + 1`` the agent's next token, in whatever turn::

        r_t  = the turn's reward on its last token, minus beta (log pi_old - log pi_ref) if `kl_in: reward`
        d_t  = r_t + gamma_t V_{t+1} - V_t,      A_t = d_t + gamma_t lambda A_{t+1},      R_t = A_t + V_t
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
                         + value_coefficient .5 max((V - R_t)^2, (clip(V, V_t - value_clip, V_t + value_clip) - R_t)^2)
                         - entropy_coefficient H_t  + beta k3_t if `kl_in: loss` )

    The text of the environment between two turns carries value and advantage through unchanged. Truncated episodes
    bootstrap from the value of their last state, terminated ones do not. Where the last observation of a truncated
    episode exceeds the context window, they bootstrap from the state at the end of the window. Advantages are
    whitened over all of a policy's tokens on all ranks, returns never. ``data.passes`` and ``data.minibatches`` say how
    often a collection is used.

    Logged for each policy under ``train/``, as means over all action tokens of an update, on all ranks and in all
    micro-batches: ``approx_kl`` (k3 estimate of the KL divergence of the current policy from the old policy),
    ``clip_fraction``,
    ``ratio_deviation`` (largest ``|rho - 1|``), ``value_loss`` (before its coefficient), ``entropy`` (nats per token,
    when it has a coefficient), ``grad_norm`` and ``grad_norm_value``, and with a reference ``kl`` (k3) and, once a
    collection, ``kl_coefficient`` and ``reference_kl`` (k1, what the controller sees). Once a collection
    ``explained_variance`` of the values (1 is perfect, 0 as good as a constant) and ``return``. ``early_stop`` is 1
    where ``target_kl`` ended a collection. The ``mismatch_*`` numbers and ``correction_weight`` are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats, schedule, warmup_steps, betas: see :class:`Algorithm`.
        critics: a model of its own to estimate the values, by the name of the policy; a policy without one has a value
            head on its own last hidden state. A critic has its own learning rate.
        value_learning_rate: of value heads; None is the learning rate of the model that they stand on.
        gamma: discount factor.
        discount_unit: ``turn`` discounts from turn to turn, ``token`` from token to token.
        lam: GAE's lambda per token; 0 trusts the values, 1 the returns.
        whiten_advantages: subtract their mean and divide by their standard deviation.
        clip_low, clip_high: how far the ratio may move before its gradient stops.
        dual_clip: bound ``c`` of the loss at negative advantages (1912.09729); None has no bound.
        value_clip: how far a value may move before its gradient stops; None has no bound.
        value_coefficient: weight of the value loss.
        entropy_coefficient: weight of the entropy bonus.
        kl_coefficient: ``beta``; 0 skips the reference model altogether.
        kl_in: ``reward`` charges k1 to each token's reward; ``loss`` adds k3 to its loss.
        kl_target: nats per token towards which ``beta`` is steered; None keeps it; see :class:`KLController`.
        kl_horizon: episodes in which ``beta`` changes by at most a fifth.
        target_kl: an update whose mean ``approx_kl`` exceeds this is the last one on its collection; None has no limit.
        reduction: how token losses become one number; see :data:`mrlm_pl.losses.Reduction`.
        max_length: longest response in tokens, for ``reduction: constant_length``.
        recompute_old_logp: take pi_old from the learner at the time of sampling rather than from the sampler. None does
            so only where the sampler's numbers are not the learner's: truncated sampling or reduced precision.
        correction: weight of the policy's losses, not of the values', for the difference between the two; ``plain`` is
            decoupled PPO (arXiv 2505.24298); see :class:`mrlm_pl.losses.Correction`.
        reference: what holds the reference model and computes with it, such as ``RayReference``; None: this process.

    Raises:
        ConfigurationError: a value out of range, a critic for a policy that does not exist, or with another tokenizer.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        critics: dict[str, Policy] | None = None,
        value_learning_rate: float | None = None,
        gamma: float = 1.0,
        discount_unit: DiscountUnit = "turn",
        lam: float = 0.95,
        whiten_advantages: bool = True,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        value_clip: float | None = 0.2,
        value_coefficient: float = 0.5,
        entropy_coefficient: float = 0.0,
        kl_coefficient: float = 0.0,
        kl_in: Literal["reward", "loss"] = "reward",
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        target_kl: float | None = None,
        reduction: Reduction = "token_mean",
        max_length: int | None = None,
        recompute_old_logp: bool | None = None,
        correction: Correction = Correction(),  # noqa: B008 (frozen)
        reference: Reference | None = None,
    ) -> None:
        super().__init__(policies, seats, schedule, warmup_steps, betas)
        self.refuse_dropout()
        for name, critic in (critics or {}).items():
            if name not in self.policies or not self.policy(name).trained:
                trained = [policy for policy in self.policies if self.policy(policy).trained]
                raise ConfigurationError(f"critics names {name!r}, which is no trained policy; these are {trained}")
            check_critic(f"critics.{name}", critic)
            check_reads(f"critics.{name}", critic, name, self.policy(name))
        ranges = (
            ("gamma", gamma, 0 <= gamma <= 1, "between 0 and 1"),
            ("lam", lam, 0 <= lam <= 1, "between 0 and 1"),
            ("clip_low", clip_low, 0 < clip_low < 1, "between 0 and 1"),
            ("clip_high", clip_high, clip_high > 0, "above 0"),
            ("dual_clip", dual_clip, dual_clip is None or dual_clip > 1, "above 1, or null"),
            ("value_clip", value_clip, value_clip is None or value_clip > 0, "above 0, or null"),
            ("value_coefficient", value_coefficient, value_coefficient >= 0, "0 or above"),
            ("entropy_coefficient", entropy_coefficient, entropy_coefficient >= 0, "0 or above"),
            ("target_kl", target_kl, target_kl is None or target_kl > 0, "above 0, or null"),
            ("discount_unit", discount_unit, discount_unit in get_args(DiscountUnit), "turn or token"),
            ("kl_in", kl_in, kl_in in ("reward", "loss"), "reward or loss"),
        )
        for key, value, holds, remedy in ranges:
            if not holds:
                raise ConfigurationError(f"{key} is {value!r}; it must be {remedy}")
        if (reduction == "constant_length") != (max_length is not None):
            raise ConfigurationError(
                f"max_length is {max_length} with reduction {reduction!r}; it belongs to `reduction: constant_length`"
            )
        self.critics = nn.ModuleDict(critics or {})
        self.value_learning_rate = value_learning_rate
        self.gamma, self.discount_unit, self.lam, self.whiten_advantages = gamma, discount_unit, lam, whiten_advantages
        self.clip = {"clip_low": clip_low, "clip_high": clip_high}
        self.dual_clip, self.value_clip, self.value_coefficient = dual_clip, value_clip, value_coefficient
        self.entropy_coefficient, self.kl_in, self.target_kl = entropy_coefficient, kl_in, target_kl
        self.reduction, self.max_length = reduction, max_length
        self.correction, self.recompute_old_logp = correction, correction.recomputes(recompute_old_logp)
        self.kl_controllers = {name: KLController(kl_coefficient, kl_target, kl_horizon) for name in self.policies}
        self.reference = ReferencePolicy(kl_coefficient > 0, reference)
        self._over = False

    @property
    def collection_over(self) -> bool:
        return self._over

    def weighs_sampler(self, sampling: Sampling) -> bool:
        return self.correction.kind != "none" or not self.recomputes(sampling)

    def has_values(self, name: str) -> bool:
        """Whether the values are trained on a policy's own rows rather than on those of a critic."""
        return True

    def critic(self, name: str) -> Policy:
        """What estimates the values of a policy: its critic, or the policy itself."""
        critic = self.critics[name] if name in self.critics else self.policy(name)
        assert isinstance(critic, Policy)
        return critic

    def read_weights(self) -> None:
        super().read_weights()
        for name in self.policies:
            if name in self.critics:
                self.critic(name).load_critic(f"{name}/critic")
            elif self.policy(name).trained and self.has_values(name):
                self.policy(name).add_value_head()

    def networks(self) -> list[nn.Module]:
        return super().networks() + [network for name in self.critics for network in self.critic(name).networks()]

    def idle_loss(self, name: str) -> Tensor:
        idle = super().idle_loss(name)
        if name in self.critics and self.trainer.world_size > 1:
            idle = idle + self.critic(name).idle_values()
        return idle

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        for name in [group["policy"] for group in groups]:
            if name in self.critics:
                groups += critic_groups(f"{name}/critic", name, self.critic(name), self.value_learning_rate)
            elif self.has_values(name):
                groups.append(value_group(name, self.policy(name), self.value_learning_rate))
        return groups

    def prepare(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode] = ()
    ) -> dict[str, PolicyBatch]:
        self._over = False
        temperature = sampling.temperature or 1.0
        tables = rewarded_rows(episodes, dict.fromkeys(self.policies, temperature))
        recomputed = self.recomputes(sampling)
        rows: dict[str, PolicyBatch] = {}
        for name in self.policies:
            if self.policy(name).trained and name in tables:
                rows |= self._credit(name, tables[name], recomputed)
            elif self.policy(name).trained:
                self._take_part(name)
        return rows

    def recomputes(self, sampling: Sampling) -> bool:
        """Whether pi_old is the learner's at the time of sampling rather than the sampler's."""
        return self.sampler_differs(sampling) if self.recompute_old_logp is None else self.recompute_old_logp

    def reads_sampler_logprobs(self, sampling: Sampling) -> bool:
        return not self.recomputes(sampling) or self.correction.kind != "none"

    def _credit(self, name: str, table: RewardedRows, recomputed: bool) -> dict[str, PolicyBatch]:
        """The rows of a policy with all that the loss needs, by name of the learner."""
        policy, rows = self.policy(name), table.batch.to(self.device)
        table.batch, table.rewards = rows, table.rewards.to(self.device)
        mask, rewards = rows.action_mask, table.rewards
        if recomputed:
            rows.proximal_logp = policy(**rows.inputs())
        if self.reference.used:
            rows.ref_logp = self.reference.logprobs(policy, rows, self.trainer)
            penalty = kl_k1(rows.old_logp, rows.ref_logp, mask)
            if self.kl_in == "reward":
                rewards = rewards - self.kl_controllers[name].coefficient * penalty
            self._steer(name, penalty, mask, len({episode.id for episode, _ in table.origins}))
        values, end_values = self._estimates(name, table)
        discounts = discounts_of(mask, self.gamma, self.discount_unit)
        advantages, returns = table.advantages(rewards, values, discounts, self.lam, end_values)
        rows.values, rows.returns = values, returns
        spread = self.global_moments(returns, mask)
        error = self.global_moments(returns - values, mask)
        rows.advantages = self._whitened(advantages, mask, table.agents) if self.whiten_advantages else advantages
        self._tell(name, "return", spread.mean)
        self._tell(name, "explained_variance", 1.0 - (error.std / spread.std) ** 2 if spread.std else 0.0)
        return {name: rows}

    def _whitened(self, advantages: Tensor, mask: Tensor, agents: Sequence[str]) -> Tensor:
        """Advantages [B, T] whitened over those of all ranks, which must all ask.

        Args:
            advantages, mask: [B, T].
            agents: whose row each is.
        """
        return whiten(advantages, mask, self.global_moments(advantages, mask))

    def _take_part(self, name: str) -> None:
        """What :meth:`_credit` asks of all ranks, on one without rows of the policy."""
        nothing, nowhere = torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.bool)
        if self.reference.used:
            self._steer(name, nothing, nowhere, 0)
        for _ in range(2):
            self.global_moments(nothing, nowhere)
        if self.whiten_advantages:
            self._whitened(nothing, nowhere, ())

    def _estimates(self, name: str, table: RewardedRows) -> tuple[Tensor, Tensor]:
        """Values [B, T] of the action tokens, and [B] of the last states of truncated episodes, 0 for the others.

        The last state of a truncated episode is its whole row. Where the last observation exceeds the context window,
        it is the row's beginning that fits: the value of a prefix is the expectation over all that may follow it.

        Raises:
            ConfigurationError: an action token lies beyond the window of the model that estimates the values.
        """
        inputs = table.batch.inputs()
        mask, lengths = inputs["action_mask"], inputs["lengths"]
        windows = torch.tensor(
            [min(critic.context_window, mask.shape[1]) for critic in self._critics_of(name, table.agents)],
            device=mask.device,
        )
        check_window(mask, windows, f"the critic of policy {name!r}")
        unfinished = table.unfinished.to(mask.device)
        last = lengths.minimum(windows)
        # The value of a state is read where its next token would be chosen.
        chosen_next = torch.arange(mask.shape[1] + 1, device=mask.device) == last[:, None]
        inputs["token_ids"] = nn.functional.pad(inputs["token_ids"], (0, 1))
        inputs["action_mask"] = nn.functional.pad(mask, (0, 1)) | (chosen_next & unfinished[:, None])
        inputs["lengths"] = lengths + unfinished
        values = self._values(name, inputs, table.agents)
        ends = values.gather(1, last[:, None])[:, 0]
        return values[:, :-1].masked_fill(~mask, 0.0), torch.where(unfinished, ends, 0.0)

    def _critics_of(self, name: str, agents: Sequence[str]) -> list[Policy]:
        """The model that estimates the values of each of a policy's rows; ``agents`` says whose they are."""
        return [self.critic(name)] * len(agents)

    def _values(self, name: str, inputs: dict[str, Any], agents: Sequence[str]) -> Tensor:
        """Values [B, T] of a policy's rows; ``agents`` says whose they are."""
        return self.critic(name).values(**inputs)

    def _steer(self, name: str, penalty: Tensor, mask: Tensor, episodes: int) -> None:
        """Log the divergence from the reference over all ranks, and update the controller with it.

        Args:
            penalty, mask: [B, T].
            episodes: of this rank that the rows are from, each counted once whichever agents the policy played in it.
        """
        controller = self.kl_controllers[name]
        kl = self.global_moments(penalty, mask).mean
        self._tell(name, "reference_kl", kl)
        self._tell(name, "kl_coefficient", controller.coefficient)
        controller.update(kl, merged(self.trainer, {"episodes": episodes})["episodes"])

    def _tell(self, name: str, metric: str, value: float) -> None:
        self.metrics.rollout[self.metrics.name(metric, name)] = value

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        assert rows.advantages is not None
        mask, old_logp = rows.action_mask, rows.old_logp
        found = self.policy(name).outputs(**rows.inputs(), with_entropy=self.entropy_coefficient > 0)
        logp = found.logp
        policy_losses = ppo_clip_loss(logp, old_logp, rows.advantages, mask, dual_clip=self.dual_clip, **self.clip)
        weights = self.correction.weights(old_logp, rows.behavior_logp, mask)
        losses = policy_losses * weights
        metrics = {}
        if self.has_values(name):
            assert rows.values is not None
            assert rows.returns is not None
            values = found.values if found.values is not None else self.critic(name).values(**rows.inputs())
            value_losses = value_loss(values, rows.values, rows.returns, mask, clip=self.value_clip)
            losses = losses + self.value_coefficient * value_losses
            metrics["value_loss"] = masked_mean(value_losses.detach(), mask)
        if found.entropy is not None:
            losses = losses - self.entropy_coefficient * found.entropy
        if rows.ref_logp is not None and self.kl_in == "loss":
            losses = losses + self.kl_controllers[name].coefficient * kl_k3(logp, rows.ref_logp, mask)
        metrics["clip_fraction"] = clip_fraction(logp, old_logp, rows.advantages, mask, **self.clip)
        if found.entropy is not None:
            metrics["entropy"] = masked_mean(found.entropy, mask)
        if self.correction.kind != "none":
            metrics["correction_weight"] = masked_mean(weights, mask)
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

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.target_kl is None:
            return
        moved = [self.metrics.update.get(self.metrics.name("approx_kl", name), 0.0) for name in self.policies]
        before, self._over = self._over, self._over or max(moved) > self.target_kl
        self.log("train/early_stop", float(self._over and not before), batch_size=1)

    def progress(self) -> dict[str, Any]:
        coefficients = {name: controller.coefficient for name, controller in self.kl_controllers.items()}
        return {"kl_coefficients": coefficients, "collection_over": self._over}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        for name, coefficient in progress.get("kl_coefficients", {}).items():
            # A fixed coefficient is what is configured, also when that has changed.
            if name in self.kl_controllers and self.kl_controllers[name].target is not None:
                self.kl_controllers[name].coefficient = coefficient
        self._over = progress.get("collection_over", False)

    def _is_saved(self, weight: str) -> bool:
        owner, _, rest = weight.partition(".")
        name, _, inner = rest.partition(".")
        return self.critic(name).is_saved(inner) if owner == "critics" else super()._is_saved(weight)

    def export(self, folder: str | Path, write: bool = True) -> None:
        """Write every trained policy as ``folder/NAME``, with its value head, and critics as ``folder/NAME-critic``."""
        super().export(folder, write)
        for name, critic in self.critics.items():
            assert isinstance(critic, Policy)
            critic.save_pretrained(Path(folder) / f"{name}-critic", write=write)
