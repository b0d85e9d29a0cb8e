"""Group relative policy optimization, and its relatives that differ in the baseline, the clip or the reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from mrlm_pl.advantages import (
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
)
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import Clip
from mrlm_pl.settings import as_settings

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

    Relatives: Dr.GRPO (2503.20783) is ``advantage: group_centered`` with ``reduction: constant_length``; RLOO
    (2402.14740) is ``advantage: leave_one_out``; DAPO (2503.14476) is ``clip.high: 0.28`` with an
    ``overlong_buffer`` and ``data.resample_rounds``.

    Beside the numbers of :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`, ``clip_fraction`` is logged, the
    share of tokens whose gradient the clip removes.

    Args:
        advantage: how the returns of a group become advantages: a name, or a function of returns [N] and group numbers
            [N] that returns advantages [N], in a configuration by its import path.
        clip: range in which the ratio has a gradient; see :class:`mrlm_pl.losses.Clip`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        *args: Any,
        advantage: Literal["group_normalized", "group_centered", "leave_one_out"]
        | Callable[..., Any] = "group_normalized",
        clip: Clip = Clip(),  # noqa: B008 (frozen)
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        if isinstance(advantage, str) and advantage not in ADVANTAGES:
            raise ConfigurationError(f"advantage {advantage!r} must be one of {sorted(ADVANTAGES)}, or a function")
        self.advantage = ADVANTAGES[advantage] if isinstance(advantage, str) else advantage
        self.clip = as_settings(Clip, clip, "clip")
