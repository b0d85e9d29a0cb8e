"""On-policy distillation: students sample, teachers score every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.policies.distillation import Distillation
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import token_loss
from mrlm_pl.policy import Policy


class OnPolicyDistillation(PolicyGradient):
    """On-policy distillation (arXiv 2306.13649) from frozen policies, from the student itself, or from a team.

    The environment's rewards are measured, but train nothing. For the tokens that a student ``q`` samples and a teacher
    ``p``::

        sampled   A_t  = log p(token_t) - log q_old(token_t)
                  loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t) + beta KL_t )
        full      loss = reduce_t( D(p, q) + beta KL_t )
        top_k     the same with the teacher's k most probable tokens and one bucket of all others

    with the divergence ``D`` of :class:`~mrlm_pl.learner.policies.distillation.Distillation`. In expectation over the
    student's tokens, ``sampled`` has the gradient of ``full`` with ``beta: 1`` at the first update on a rollout. As in
    the paper, no gradient flows through the sampling of the tokens before.

    With a ``reprompt`` and no ``policy`` the student teaches itself, with more information: SDPO (2601.20802) with
    ``sibling`` or ``feedback``, SDFT (2601.19897) with ``demonstration``. Any other policy gradient takes the same
    ``distillation`` in addition to its rewards.

    In addition to the numbers of :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`, these are logged for each
    policy: ``teacher_divergence`` (nats per token: the reverse KL's estimate for ``sampled``, else ``D``),
    ``teacher_agreement`` (mean of ``min(1, p / q)`` over the sampled tokens: 1 minus the total variation), and
    ``taught_rows`` (fraction of the trajectories with a teacher).

    Args:
        distillation: teachers and form of the loss; see :class:`~mrlm_pl.learner.policies.distillation.Distillation`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: there is no teacher, it cannot teach the students, an option has no effect, or a value is
            out of range.
    """

    default_loss = "ppo"
    no_signal_reason = "no episode counts as solved, so that no sibling has an answer to teach"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        distillation: Distillation | None = None,
        **settings: Any,
    ) -> None:
        if distillation is None:
            raise ConfigurationError(
                "OnPolicyDistillation has no teacher; name a policy with `trained: false`: "
                "`distillation: {teachers: [{policy: NAME}]}`, or `{reprompt: sibling}` for the policy itself"
            )
        super().__init__(policies, seats, distillation=distillation, **settings)
        assert self.distiller is not None
        in_loss = self.distiller.in_loss
        idle = {
            "overlong_buffer": self.overlong_buffer > 0,
            "task_normalization": self.task_normalization not in (None, "none"),
            "loss, loss_settings or clip": in_loss and self.loss != token_loss(self.default_loss),
            "correction": in_loss and self.old_policy.correction.kind != "none",
            "off_policy_threshold": in_loss and self.old_policy.threshold is not None,
        }
        for option, given in idle.items():
            if given:
                raise ConfigurationError(
                    f"OnPolicyDistillation with distillation.form {self.distiller.settings.form} does not read "
                    f"{option}; leave it out, or give `distillation` to an algorithm with rewards, such as GRPO"
                )
        self.task_normalization = "none"
        if all(teacher.reprompt == "sibling" for teacher in self.distiller.settings.teachers):
            self.smallest_group = 2

    def advantages(self, returns: Returns) -> Tensor:
        return torch.zeros_like(returns.reward)

    def lacks_signal(self, group: Sequence[Episode]) -> bool:
        """Return whether the only teachers are successful siblings, and none succeeded."""
        return self.smallest_group > 1 and not any(episode.success for episode in group if not episode.failed)
