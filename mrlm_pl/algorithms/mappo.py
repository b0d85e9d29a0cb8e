"""Multi-agent proximal policy optimization: decentralized actors, one centralized critic."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mrlm_pl.advantages import NO_MOMENTS, masked_moments
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import not_none
from mrlm_pl.learner.credit.joint_states import CriticTargets, JointReader, acting_batches, joint_states
from mrlm_pl.learner.credit.returns import Batches
from mrlm_pl.learner.credit.team import joint_history, warn_of_constant_sum
from mrlm_pl.learner.critics import CentralizedCritic
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, UnitInterval


class MAPPO(PolicyGradient):
    """PPO with one centralized critic (MAPPO, arXiv 2103.01955; CoMLRL's MAAC).

    ``s_t`` is the joint state before step t of the environment: all agents' conversations up to it, in the order of the
    steps. The critic, a language model with a value head, reads it as text in its own chat format. ``r_t`` is the mean
    over the agents of their rewards at that step. All tokens that any agent sampled at step t share ``A_t``::

        d_t    = r_t + gamma V(s_{t+1}) - V(s_t),      A_t = d_t + gamma lambda A_{t+1}
        actor  = reduce_t( -min(rho A_t, clip(rho, 1 - clip.low, 1 + clip.high) A_t) + beta KL )
        critic = mean_t 0.5 max((V - y_t)^2, (clip(V, V_t - value_clip, V_t + value_clip) - y_t)^2)

    with ``y_t`` the ``lambda``-return ``A_t + V(s_t)``, the one-step ``td`` target ``r_t + gamma V(s_{t+1})``, or the
    ``monte_carlo`` return. Truncated episodes bootstrap from the value of their last joint state;
    terminated ones do not. Advantages are whitened over each policy's tokens on all ranks, targets never.
    ``data.passes`` and ``data.minibatches`` say how often a rollout is used.

    Logged under ``train/critic/``: ``value_loss``, ``grad_norm`` and ``grad_norm_value``, and once a rollout
    ``return`` (mean target), ``explained_variance`` (1 is perfect, 0 as good as a constant) and ``shortened_states``
    (how many were cut on the left to the critic's window). For each policy ``clip_fraction``, and the numbers of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        critic: the critic's model, with its own tokenizer and learning rate; None copies the first trained policy's.
        value_learning_rate: learning rate of the critic's value head; None is the critic's.
        gamma: discount factor per step of the environment.
        lam: GAE's lambda per step; 0 trusts the critic, 1 the returns.
        targets: targets of the critic: ``lambda``, ``td`` or ``monte_carlo``.
        whiten_advantages: subtract the advantages' mean over each policy's tokens and divide by their standard
            deviation.
        value_clip: clipping range of a value around its old estimate; None does not clip.
        normalize_values: see :class:`~mrlm_pl.algorithms.ppo.PPO`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, a critic that is not trained, or a policy named ``critic``.
    """

    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        critic: Policy | None = None,
        value_learning_rate: NonNegativeFloat | None = None,
        gamma: UnitInterval = 1.0,
        lam: UnitInterval = 0.95,
        targets: CriticTargets = "lambda",
        whiten_advantages: bool = True,
        value_clip: PositiveFloat | None = 0.2,
        normalize_values: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        if critic is None:
            policy = next(iter(self.trained_policies.values()))
            critic = copy.deepcopy(policy, {id(policy.reference): None})  # a critic has no reference
        values = value_learning_rate, value_clip, 1.0, normalize_values
        self.critic: CentralizedCritic = CentralizedCritic(critic, self.learners, *values)
        self.gamma, self.lam, self.targets, self.whiten_advantages = gamma, lam, targets, whiten_advantages

    def critic_texts(self, episode: Episode) -> list[str]:
        """Return the text that the critic reads in addition before each step and at the end: steps + 1 texts."""
        return joint_history(episode)

    def credit(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]) -> Batches:
        warn_of_constant_sum(episodes, "MAPPO learns from the team's reward alone, so use IPPO", self.warned)
        ((name, critic),) = self.critic.learners.items()
        reader = JointReader(critic.chat, critic.context_window)
        states = joint_states(episodes, reader, self.turn_bonus(sampling), self.critic_texts)
        rows: Batches = {}
        own: dict[str, Any] = {}
        if self.critic.normalized:
            self.critic.observe(self.trainer, {(name, name): states.observed(self.gamma)} if states else {})
        if states is not None:
            batch = states.batch
            values = critic.values(batch.inputs())
            credit = states.credit(values, self.gamma, self.lam, self.targets)
            rows = {**acting_batches(episodes, credit), name: batch}
            returns = not_none(batch.returns)
            own["return"] = masked_moments(returns, batch.action_mask)
            own["error"] = masked_moments(returns - not_none(batch.values), batch.action_mask)
            own["shortened"] = reader.shortened
        totals = sum_over_ranks(self.trainer, own)
        self.metrics.add_values(name, totals.get("return", NO_MOMENTS), totals.get("error", NO_MOMENTS))
        self.metrics.rollout[self.metrics.name("shortened_states", name)] = float(totals.get("shortened", 0))
        return rows
