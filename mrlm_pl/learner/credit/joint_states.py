"""The joint states of a rollout as rows of a centralized critic, and the credit that its values give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import Moments, masked_moments, transition_gae
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import DataError, PolicyError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.returns import Batches, credit_turns, group_numbers
from mrlm_pl.learner.credit.team import joint_history, team_rewards
from mrlm_pl.learner.credit.tokens import rewarded_rows
from mrlm_pl.policy.chat.conversation import ChatFormat, Conversation, Row
from mrlm_pl.rewards import TurnBonus

CriticTargets = Literal["lambda", "td", "monte_carlo"]
StepCredit = Mapping[tuple[int, int], tuple[float, float, float]]
"""Return, baseline and advantage of the joint action by (number of the episode, step)."""


class JointReader:
    """Turns joint histories into token rows; the value of a state is read where the reader would reply.

    Each step's text is a user message, answered by an empty reply, so that a row grows by appending and one forward
    pass values all states of an episode. A state that does not fit into the window begins its own row with the
    end of its history.

    Args:
        chat: the critic's chat format.
        window: maximum number of tokens that the critic reads.
    """

    def __init__(self, chat: ChatFormat, window: int) -> None:
        self.chat, self.window = chat, window
        self.shortened = 0

    def read(self, texts: Sequence[str]) -> list[Trajectory]:
        """Return rows whose action tokens are the states, in order; ``shortened`` counts the truncated states.

        Raises:
            PolicyError: the window has no room for any text.
        """
        finished: list[Row] = []
        current = Conversation(self.chat)
        for number, text in enumerate(texts):
            longer = current.fork()
            longer.observe([Message("user", text)])
            if len(longer.row.token_ids) >= self.window:
                if number:
                    finished += current.rows
                longer = self._end_of("\n".join(texts[: number + 1]))
                self.shortened += 1
            current = longer
            current.act([self.chat.end_id], [0.0])
        return [
            Trajectory("", "", tuple(row.token_ids), tuple(row.action_mask), tuple(row.logprobs), ())
            for row in (*finished, *current.rows)
        ]

    def _end_of(self, text: str) -> Conversation:
        """Return a conversation that begins with as much of the text's end as fits."""
        ids = self.chat.encode(text)
        count = min(len(ids), self.window)
        while count > 0:
            conversation = Conversation(self.chat)
            conversation.observe([Message("user", self.chat.decode(ids[len(ids) - count :]))])
            excess = len(conversation.row.token_ids) + 1 - self.window
            if excess <= 0:
                return conversation
            count -= excess
        raise PolicyError(
            f"the critic's window of {self.window} tokens has no room for a state; give it a larger model"
        )


@dataclass
class JointStates:
    """All M states of a rollout by (episode, step), and the D decisions in them.

    A truncated episode has one state more than decisions: the last one, in which no agent decided.

    Attributes:
        batch: rows whose action tokens are the states, in order.
        decided: [M], False for the last state of a truncated episode.
        rewards: [D] fp32, team reward of each joint action.
        terminated: [D], True for the last decision of an episode that the environment ended.
        truncated: [D], True for the last decision of an episode that was truncated after it.
        keys: (index of the episode, step) of each decision.
    """

    batch: PolicyBatch
    decided: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    keys: list[tuple[int, int]]

    def observed(self, gamma: float) -> Moments:
        """Return the moments of the returns of the joint actions."""
        nothing = torch.zeros_like(self.rewards)
        return masked_moments(self._gae(nothing, nothing, gamma, 1.0)[1], torch.ones_like(self.terminated))

    def _gae(self, values: Tensor, following: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        return transition_gae(self.rewards, values, following, self.terminated, self.truncated, gamma=gamma, lam=lam)

    def credit(self, values: Tensor, gamma: float, lam: float, targets: CriticTargets) -> StepCredit:
        """Return the credit of the joint actions, and put values and targets of their states into the batch.

        States in which no agent decided are taken out of its action mask.

        Args:
            values: [B, T], values of the states.
            gamma: discount factor per step.
            lam: GAE's lambda.
            targets: targets of the critic: the ``lambda``-return, the one-step ``td`` target or the ``monte_carlo``
                return.

        Raises:
            NonFiniteError: a reward or value is NaN or infinite.
        """
        batch = self.batch
        padded = values.detach().float().cpu()
        states = padded[batch.action_mask]
        following = torch.cat([states[1:], states.new_zeros(1)])[self.decided]
        values = states[self.decided]
        advantages, returns = self._gae(values, following, gamma, lam)
        credit = zip(returns.tolist(), values.tolist(), advantages.tolist(), strict=True)
        if targets != "lambda":
            returns = self._gae(values, following, gamma, 0.0 if targets == "td" else 1.0)[1]
        batch.action_mask = batch.action_mask.masked_scatter(batch.action_mask, self.decided)
        nothing = torch.zeros_like(padded)
        batch.values, batch.returns = (
            nothing.masked_scatter(batch.action_mask, numbers) for numbers in (values, returns)
        )
        return dict(zip(self.keys, credit, strict=True))


def joint_states(
    episodes: Sequence[Episode],
    reader: JointReader,
    turn_bonus: TurnBonus = None,
    texts_of: Callable[[Episode], Sequence[str]] = joint_history,
) -> JointStates | None:
    """Return the joint states of a rollout, or None if no agent decided; failed episodes are left out.

    Args:
        episodes: episodes of one rollout.
        reader: reader of the critic.
        turn_bonus: function that returns a bonus for a turn, added to the environment's reward; None adds nothing.
        texts_of: function that returns the new text of each state of an episode, and of its end: steps + 1 texts.
    """
    groups = group_numbers(episodes)
    numbered: list[tuple[int, Trajectory]] = []
    keys: list[tuple[int, int]] = []
    ends: list[tuple[bool, bool]] = []
    decided: list[bool] = []
    all_rewards: list[float] = []
    for number, episode in enumerate(episodes):
        rewards = [] if episode.failed else team_rewards(episode, turn_bonus)
        if not rewards:
            continue
        texts = texts_of(episode)
        if len(texts) != len(rewards) + 1:
            raise DataError(
                f"critic_texts returned {len(texts)} texts for episode {episode.id!r} of {len(rewards)} steps; return "
                "one for each step and one for the end"
            )
        numbered += [(number, row) for row in reader.read(texts if episode.truncated else texts[:-1])]
        keys += [(number, step) for step in range(len(rewards))]
        ends += [(False, False)] * (len(rewards) - 1) + [(not episode.truncated, episode.truncated)]
        decided += [True] * len(rewards) + [False] * episode.truncated
        all_rewards += rewards
    if not numbered:
        return None
    row_groups = [groups[episodes[number].group] for number, _ in numbered]
    batch = collate_rows([row for _, row in numbered], row_groups, row_groups, [number for number, _ in numbered])
    terminated, truncated = torch.tensor(ends).unbind(1)
    joint_rewards = torch.tensor(all_rewards, dtype=torch.float32)
    return JointStates(batch, torch.tensor(decided), joint_rewards, terminated, truncated, keys)


def acting_batches(episodes: Sequence[Episode], credit: StepCredit) -> Batches:
    """Return the trajectories of every policy; all tokens of a turn have the credit of the turn's step.

    Args:
        episodes: episodes of one rollout.
        credit: credit of all steps of all episodes that did not fail.
    """
    numbers = {id(episode): number for number, episode in enumerate(episodes)}
    acted = rewarded_rows(episodes)
    for rewarded in acted.values():
        rows = zip(rewarded.episodes, rewarded.batch.trajectories, strict=True)
        turn_credits = [[credit[numbers[id(episode)], turn.index] for turn in row.turns] for episode, row in rows]
        credit_turns(rewarded.batch, turn_credits)
    return {policy: rewarded.batch for policy, rewarded in acted.items()}
