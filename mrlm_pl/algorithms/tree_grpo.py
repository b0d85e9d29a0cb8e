"""Tree-GRPO: chains grow to trees whose leaves share prefixes, in the rollout and in the update."""

from __future__ import annotations

from typing import Any

from mrlm_pl.advantages import TurnBaseline
from mrlm_pl.learner.credit.branches import LeafCredit
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.branches import Expansions


class TreeGRPO(PolicyGradient):
    """Tree-based group relative policy optimization (arXiv 2509.21240).

    A task has M chains (``data.group_size``). In each of ``rounds`` rounds, ``nodes`` random states of every chain's
    tree are continued to the end, which makes M (1 + ``rounds`` ``nodes``) leaves with returns ``R_i``. A leaf
    generates the tokens behind its state alone, and the update computes common prefixes once. For turn t of leaf i::

        unbiased: A_t = (R_i - mean of the R_j that do not contain this turn) / std(R of the task)
        paper:    A_t = (R_i - mean(R of the tree)) / std(R of the tree) + (R_i - mean(R)) / std(R of the task)
        loss      = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t) + beta KL_t )

    A shared turn is credited once in each leaf that contains it, as in the paper. If all episodes have equally many
    turns every leaf is a sample of the policy, and ``unbiased`` without ``normalize`` has the gradient of the expected
    return. ``paper`` compares a shared turn with leaves that contain it, which cancels its credit within the tree:
    early turns have the comparison between trees alone, later ones both. If the number of turns varies, states of
    long episodes are drawn less often each, and neither is exact.

    The environment must be deterministic in its task.

    Args:
        rounds: rounds of expansion.
        nodes: states of each tree that are continued in a round.
        turn_baseline: ``unbiased`` or ``paper`` baseline of a turn.
        normalize: divide by the standard deviations; False keeps the scale of the rewards.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        rounds: int = 1,
        nodes: int = 2,
        turn_baseline: TurnBaseline = "unbiased",
        normalize: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = LeafCredit(turn_baseline, normalize, branch_rule=Expansions(rounds, nodes))
