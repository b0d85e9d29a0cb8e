"""Contextual counterfactual credit: each message against other samples of the same agent in the same context."""

from __future__ import annotations

from typing import Any

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.learner.credit.branches import AlternativeCredit
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.branches import Alternatives
from mrlm_pl.rollout.replay import Rest


class C3(PolicyGradient):
    """Contextual counterfactual credit assignment (arXiv 2603.06859).

    The context of a message, everything before it in a finished episode, is frozen. ``alternatives`` fresh samples of
    the same agent take its place, and each is its own episode with return ``Q_k``. With ``rest: play`` the later
    decisions are sampled again, and the recorded message is one of the K compared::

        A_k  = Q_k - mean over the others of Q_j
        loss = reduce_t( -A_k log pi(token_t) + beta KL_t ),  t in message k

    Then the expected gradient is that of the expected return. With ``rest: replay`` the recorded later decisions are
    kept, no token but the alternatives' is generated, and only alternatives are compared: this estimates the gradient
    of the return under continuations that do not answer the message, and misses its effect through later decisions.

    The environment must be deterministic in its task. There is no ratio and no clip, so use a rollout once
    (``data.passes`` and ``data.minibatches`` 1). ``data.group_size`` counts the ordinary episodes of a task. With
    ``messages`` and episodes of different length, a message of a longer one weighs less.

    Args:
        alternatives: number of fresh samples for each message.
        messages: number of messages of an episode to branch at, drawn uniformly; None branches at all messages of
            trained policies.
        rest: ``play`` samples the decisions after the message again, ``replay`` keeps them.
        reward: ``team`` is the mean over the agents, ``own`` each agent's own.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    advantage = staticmethod(leave_one_out_advantages)

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        alternatives: int = 3,
        messages: int | None = None,
        rest: Rest = "play",
        reward: RewardShare = "team",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        others = Alternatives(alternatives, messages, rest, tuple(self.trained_policies))
        self.unit = AlternativeCredit(others, reward)
