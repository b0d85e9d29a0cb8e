"""Multi-agent ReMax: the joint return against that of the greedy joint rollout."""

from __future__ import annotations

from typing import Any, Literal

from mrlm_pl.advantages import group_max_advantages
from mrlm_pl.learner.joint_actions import JointActions
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy


class MAREMAX(JointActions, PolicyGradient):
    """Multi-agent ReMax (arXiv 2508.04652, 2310.10505).

    Each task is played once more, with the most probable token of every agent at every step; that episode is not
    trained on. For a decision of turn t with return ``R``
    (see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`)::

        A    = R - n (return of the greedy episode from turn t on; 0 where it was over)
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    ``n`` is 1, or with ``cross_reduction: sum`` the number of joint actions that ``R`` is the sum over.

    Groups whose greedy episode failed are left out. Logged once a rollout under ``train/``: ``greedy_reward``, the mean
    of the greedy episodes' returns, and ``missing_baselines``, the number of groups left out.

    Args:
        baseline: ``greedy``; or ``group_max``, the highest return in the same state, as in implementations that call
            this ReMax: it depends on the decisions that it judges, which biases the gradient.
        joint_mode, cross_reduction, gamma, stop_above, reward, weighting: see
            :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        baseline: Literal["greedy", "group_max"] = "greedy",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.uses_greedy_baseline = baseline == "greedy"
        self.advantage = None if self.uses_greedy_baseline else group_max_advantages
