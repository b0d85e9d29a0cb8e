"""Information-gain policy optimization: each turn is rewarded for its information about the reference answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.advantages import TurnBaseline
from mrlm_pl.episode import Episode, Task, Trajectory
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import collate_rows
from mrlm_pl.learner.credit.turns import TurnCredit, TurnReturns
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import information_gains
from mrlm_pl.settings import NonNegativeFloat, UnitInterval


class IGPO(PolicyGradient):
    """Information-gain policy optimization (arXiv 2510.14967).

    With the history ``h_t`` before turn t, the reference answer ``a`` of L tokens and the reward ``r_t`` of the
    environment::

        g_t  = (log pi_old(a | h_{t+1}) - log pi_old(a | h_t)) / L        0 for an agent's last turn
        A_t  = turn advantage of  r_t + gain_weight g_t                   see TurnCredit
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t) + beta KL_t )

    The paper's gain is a difference of probabilities, here it is one of mean log-probabilities. The learner's weights
    score the answer, as a whole reply, once a rollout; all histories of a task share their prefixes. The gains are
    constants of the update. They change the objective: their undiscounted sum is the gain from the prompt to the last
    turn, whatever the answer that is given there. ``train/information_gain`` is the mean gain of the turns that have
    one, in nats per token of the answer.

    Args:
        gain_weight: weight of the gains relative to the environment's rewards.
        answer_key: field of the task's data with the reference answer; of a list of answers, the first is scored.
        answer_form: reply that is scored; ``{answer}`` is replaced by the reference answer.
        gamma: discount factor per turn.
        normalize: divide by the standard deviation.
        turn_baseline: baseline of a turn's return; see :data:`mrlm_pl.advantages.TurnBaseline`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, or in a rollout a task without reference answer.
    """

    smallest_group = 2
    default_loss = "ppo"
    credit_needs_weights_for = "the information gains"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        gain_weight: NonNegativeFloat = 1.0,
        answer_key: str = "answer",
        answer_form: str = "{answer}",
        gamma: UnitInterval = 1.0,
        normalize: bool = True,
        turn_baseline: TurnBaseline = "unbiased",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        if "{answer}" not in answer_form:
            raise ConfigurationError(f"answer_form is {answer_form!r}; put {{answer}} at the place of the answer")
        self.gain_weight, self.answer_key, self.answer_form = gain_weight, answer_key, answer_form
        self.unit = TurnCredit(gamma, turn_baseline, normalize)

    def with_baselines(self, turns: TurnReturns) -> TurnReturns:
        gains = information_gains(self.answer_logp(turns), turns.play)
        followed = sum_over_ranks(self.trainer, {"gain": float(gains.sum()), "turns": int((turns.number > 0).sum())})
        if followed["turns"]:
            self.metrics.rollout["train/information_gain"] = followed["gain"] / followed["turns"]
        return super().with_baselines(replace(turns, reward=turns.reward + self.gain_weight * gains))

    def answer_logp(self, turns: TurnReturns) -> Tensor:
        """Return the log-probability per token [S] fp64 of the reference answer before each turn, by the turn's policy.

        NaN where history and answer exceed the context window, and for policies that are not trained.
        """
        of_turns = torch.full((len(turns.turn),), math.nan, dtype=torch.float64)
        for name in self.policies:
            policy, rows, indices = self.policy(name), list[Trajectory](), list[int]()
            for index, (turn, row) in enumerate(zip(turns.turn, turns.row.tolist(), strict=True)):
                history, answer = turns.trajectory[row], self._answer(policy, turns.episode[row].task)
                length = turn.start + len(answer)
                if history.policy == name and policy.trained and length <= policy.context_window:
                    mask = (*[False] * turn.start, *[True] * len(answer))
                    ids = (*history.token_ids[: turn.start], *answer)
                    rows.append(Trajectory(history.agent, name, ids, mask, (0.0,) * length, ()))
                    indices.append(index)
            if rows:
                batch = collate_rows(rows, turns.group[turns.row[indices]].tolist(), [0] * len(rows), range(len(rows)))
                logp = policy(batch.inputs()).cpu().double().sum(-1)
                of_turns[indices] = logp / batch.action_mask.sum(-1)
        return of_turns

    def _answer(self, policy: Policy, task: Task) -> list[int]:
        """Return the tokens of the reply that is scored, with the token that ends it."""
        answer = task.data.get(self.answer_key)
        if isinstance(answer, (list, tuple)):
            answer = next(iter(answer), None)
        if answer in (None, ""):
            raise ConfigurationError(
                f"task {task.key!r} has no reference answer in the field {self.answer_key!r} of its data, which has "
                f"{', '.join(map(repr, task.data)) or 'no fields'}; set answer_key, or choose an environment with "
                "reference answers or another algorithm, such as GRPO with `credit: turn`"
            )
        return [*policy.chat.encode(self.answer_form.replace("{answer}", str(answer))), policy.chat.end_id]

    def signal(self, group: Sequence[Episode]) -> tuple[TurnReturns, Tensor]:
        turns, signal = super().signal(group)
        return turns, signal.abs() + turns.number  # those after the first have gains too
