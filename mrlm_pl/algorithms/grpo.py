"""Group relative policy optimization, and its relatives that differ in the baseline, the clip or the reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from mrlm_pl.advantages import (
    TurnBaseline,
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
)
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.rules import check_takes
from mrlm_pl.learner.credit.turns import TurnCredit
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.settings import UnitInterval

ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_normalized": group_normalized_advantages,
    "group_centered": group_centered_advantages,
    "leave_one_out": leave_one_out_advantages,
}


class GRPO(PolicyGradient):
    """Group relative policy optimization (arXiv 2402.03300).

    For the G episodes of a task with returns ``r_i``, mean ``m`` and standard deviation ``s``::

        A_i  = (r_i - m) / (s + 1e-6)
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )
        rho_t = pi(token_t) / pi_old(token_t),   KL_t = e^-d + d - 1 with d = log pi - log pi_ref

    The paper's reduction is ``sequence_mean``; the default, ``token_mean``, is DAPO's.

    Relatives: Dr.GRPO (2503.20783) is ``advantage: group_centered`` with ``reduction: constant_length``; RLOO
    (2402.14740) is ``advantage: leave_one_out``; DAPO (2503.14476) is ``clip.high: 0.28`` with an
    ``overlong_buffer`` and ``data.resample_rounds``.

    In addition to the numbers of :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`, ``clip_fraction`` is logged,
    the fraction of tokens whose gradient the clip removes.

    Args:
        advantage: ``group_normalized``, ``group_centered``, ``leave_one_out``, or a function (its import path or name
            in a plugin) of returns [N] and group numbers [N] that returns advantages [N].
        credit: ``episode`` gives all turns of an agent the advantage of its return, ``turn`` compares each with the
            same turn of the other episodes (not divided by a standard deviation with ``advantage: group_centered``);
            see :class:`mrlm_pl.learner.credit.turns.TurnCredit`.
        turn_baseline: baseline of a turn's return with ``credit: turn``; see :data:`mrlm_pl.advantages.TurnBaseline`.
        gamma: discount factor per turn, with ``credit: turn``.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name, a value out of range, or a function that takes other arguments.
    """

    smallest_group = 2
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        advantage: Literal["group_normalized", "group_centered", "leave_one_out"]
        | Callable[..., Any] = "group_normalized",
        credit: Literal["episode", "turn"] = "episode",
        turn_baseline: TurnBaseline = "unbiased",
        gamma: UnitInterval = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.advantage = ADVANTAGES[advantage] if isinstance(advantage, str) else advantage
        check_takes(self.advantage, "rewards", "groups")
        if credit == "turn":
            if advantage not in ("group_normalized", "group_centered"):
                raise ConfigurationError(
                    f"advantage is {getattr(advantage, '__name__', advantage)!r} with credit 'turn', whose baseline "
                    "is that of turn_baseline; choose group_normalized or group_centered, or credit 'episode'"
                )
            self.unit = TurnCredit(gamma, turn_baseline, normalize=advantage == "group_normalized")
        elif (turn_baseline, gamma) != ("unbiased", 1.0):  # their defaults
            raise ConfigurationError("turn_baseline and gamma belong to credit 'turn'; set `credit: turn`")
