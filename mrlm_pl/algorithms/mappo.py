"""Multi-agent proximal policy optimization: decentralized actors, one centralized critic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.credit.joint_states import CriticTargets, JointReader, JointStates, acting_batches, joint_states
from mrlm_pl.learner.credit.team import warn_of_constant_sum
from mrlm_pl.learner.critics import check_critic, critic_groups, critic_loss
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import merged
from mrlm_pl.losses import clip_fraction, ppo_clip_loss
from mrlm_pl.policy import Policy

CRITIC = "critic"


class MAPPO(PolicyGradient):
    """PPO with one centralized critic (MAPPO, arXiv 2103.01955; also known as MAAC).

    ``s_t`` is the joint state before step t of the environment: all agents' conversations so far, in the order of the
    steps. The critic, a language model with a value head, reads it as text in its own chat format. ``r_t`` is the mean
    over the agents of what they were paid at that step. All tokens that any agent sampled at step t share ``A_t``::

        d_t    = r_t + gamma V(s_{t+1}) - V(s_t),      A_t = d_t + gamma lambda A_{t+1}
        actor  = reduce_t( -min(rho A_t, clip(rho, 1 - clip_low, 1 + clip_high) A_t) + beta KL )
        critic = mean_t .5 max((V - y_t)^2, (clip(V, V_t - value_clip, V_t + value_clip) - y_t)^2)

    with ``y_t`` the ``lambda``-return ``A_t + V(s_t)``, the one-step ``td`` target ``r_t + gamma V(s_{t+1})``, or the
    ``monte_carlo`` return. Truncated episodes bootstrap from the value of their last joint state;
    terminated ones do not. Advantages are whitened over each policy's tokens on all ranks, targets never.
    ``data.passes`` and ``data.minibatches`` say how often a collection is used.

    Logged under ``train/critic/``: ``value_loss``, ``grad_norm`` and ``grad_norm_value``, and once a collection
    ``return`` (mean target), ``explained_variance`` (1 is perfect, 0 as good as a constant) and ``shortened_states``
    (how many were cut on the left to the critic's window). For each policy ``clip_fraction``, and the numbers of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        critic: the critic's model, with its own tokenizer and learning rate; None is a separate copy of the first
            trained policy's.
        value_learning_rate: of the critic's value head; None is the critic's learning rate.
        gamma: discount factor, from step to step of the environment.
        lam: GAE's lambda per step; 0 trusts the critic, 1 the returns.
        targets: what the critic is trained towards: ``lambda``, ``td`` or ``monte_carlo``.
        whiten_advantages: subtract the advantages' mean and divide by their standard deviation.
        clip_low, clip_high: how far the ratio may move before its gradient stops.
        dual_clip: bound ``c`` of the loss at negative advantages (1912.09729); None has no bound.
        value_clip: how far a value may move before its gradient stops; None has no bound.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, a critic that is not trained, or a policy named ``critic``.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        critic: Policy | None = None,
        value_learning_rate: float | None = None,
        gamma: float = 1.0,
        lam: float = 0.95,
        targets: CriticTargets = "lambda",
        whiten_advantages: bool = True,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        value_clip: float | None = 0.2,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, zero_variance="keep", **settings)
        if CRITIC in self.policies:
            raise ConfigurationError(f"a policy is named {CRITIC!r}, which is what the centralized critic is called")
        ranges = (
            ("gamma", gamma, 0 <= gamma <= 1, "between 0 and 1"),
            ("lam", lam, 0 <= lam <= 1, "between 0 and 1"),
            ("targets", targets, targets in get_args(CriticTargets), f"one of {', '.join(get_args(CriticTargets))}"),
            ("clip_low", clip_low, 0 < clip_low < 1, "between 0 and 1"),
            ("clip_high", clip_high, clip_high > 0, "above 0"),
            ("dual_clip", dual_clip, dual_clip is None or dual_clip > 1, "above 1, or null"),
            ("value_clip", value_clip, value_clip is None or value_clip > 0, "above 0, or null"),
        )
        for key, value, holds, remedy in ranges:
            if not holds:
                raise ConfigurationError(f"{key} is {value!r}; it must be {remedy}")
        self.critic = self._copy_of_a_policy() if critic is None else critic
        check_critic(CRITIC, self.critic)
        self.value_learning_rate, self.value_clip = value_learning_rate, value_clip
        self.gamma, self.lam, self.targets, self.whiten_advantages = gamma, lam, targets, whiten_advantages
        self.clip = {"clip_low": clip_low, "clip_high": clip_high}
        self.dual_clip = dual_clip
        self._warned = False

    def _copy_of_a_policy(self) -> Policy:
        first = next(self.policy(name) for name in self.policies if self.policy(name).trained)
        return Policy(
            first.name_or_path,
            first.learning_rate,
            first.weight_decay,
            chat_template=first.chat_template,
            random_init_seed=first.random_init_seed,
            lora=first.lora,
            gradient_checkpointing=first.gradient_checkpointing,
            max_forward_tokens=first.max_forward_tokens,
        )

    @property
    def learners(self) -> dict[str, Policy]:
        return {**super().learners, CRITIC: self.critic}

    def read_weights(self) -> None:
        super().read_weights()
        self.critic.load_critic(CRITIC)

    def networks(self) -> list[nn.Module]:
        return super().networks() + self.critic.networks()

    def parameter_groups(self) -> list[dict[str, Any]]:
        return super().parameter_groups() + critic_groups(CRITIC, CRITIC, self.critic, self.value_learning_rate)

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        if not self._warned:
            self._warned = warn_of_constant_sum(episodes, "MAPPO learns from the team's reward alone, so use IPPO")
        reader = JointReader(self.critic.chat, self.critic.context_window)
        states = joint_states(episodes, reader, self.turn_bonus(sampling))
        rows: dict[str, PolicyBatch] = {}
        if states is not None:
            values = self.critic.values(**states.batch.to(self.device).inputs())
            advantages = states.credit(values, self.gamma, self.lam, self.targets)
            temperature = dict.fromkeys(self.policies, sampling.temperature or 1.0)
            rows = acting_batches(episodes, advantages, temperature)
        if self.whiten_advantages:
            self.whiten(rows)
        self._tell_of_values(states)
        return rows if states is None else {**rows, CRITIC: states.batch}

    def _tell_of_values(self, states: JointStates | None) -> None:
        """Log how good the values were, over all ranks."""
        returns, values, mask = torch.zeros(0, 1), torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.bool)
        if states is not None:
            assert states.batch.returns is not None
            assert states.batch.values is not None
            returns, values, mask = states.batch.returns, states.batch.values, states.batch.action_mask
        spread, error = self.global_moments(returns, mask), self.global_moments(returns - values, mask)
        shortened = merged(self.trainer, {"shortened": states.shortened if states else 0})["shortened"]
        self.metrics.rollout |= {
            f"train/{CRITIC}/return": spread.mean,
            f"train/{CRITIC}/explained_variance": 1.0 - (error.std / spread.std) ** 2 if spread.std else 0.0,
            f"train/{CRITIC}/shortened_states": float(shortened),
        }

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        if name != CRITIC:
            return super().policy_loss(name, rows, batch)
        loss, metrics = critic_loss(self.critic, rows, batch.totals[CRITIC], self.value_clip)
        self.metrics.add_policy(CRITIC, metrics, rows.action_mask.sum())
        return loss

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        mask, advantages = rows.action_mask, rows.advantages
        losses = ppo_clip_loss(logp, old_logp, advantages, mask, dual_clip=self.dual_clip, **self.clip)
        return losses, {"clip_fraction": clip_fraction(logp, old_logp, advantages, mask, **self.clip)}

    def _is_saved(self, weight: str) -> bool:
        owner, _, inner = weight.partition(".")
        return self.critic.is_saved(inner) if owner == CRITIC else super()._is_saved(weight)

    def export(self, folder: str | Path, write: bool = True) -> None:
        """Write every trained policy as ``folder/NAME``, and the critic with its value head as ``folder/critic``."""
        super().export(folder, write)
        self.critic.save_pretrained(Path(folder) / CRITIC, write=write)
