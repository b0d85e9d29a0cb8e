"""Rows in which a critic reads a question and one answer to it, without the discussion in between."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.episode import Message, Trajectory, question_to
from mrlm_pl.errors import DataError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.tokens import RewardedRows
from mrlm_pl.policy.chat import ChatFormat


def answer_rows(rewarded: RewardedRows, indices: Tensor, chat: ChatFormat) -> tuple[PolicyBatch, Tensor]:
    """Return a row for each answer in some rows of a policy: the question, then the answer's own tokens.

    Also return the answers' tokens in the policy's rows, [B, T] bool; the new rows have the same action tokens, in
    order.

    Args:
        rewarded: trajectories of one policy.
        indices: [b], indices of the rows to read, in ascending order.
        chat: the critic's chat format, with the same tokens as the policy's.

    Raises:
        DataError: the record lacks the question.
    """
    prompts: dict[str, list[int]] = {}
    rows: list[Trajectory] = []
    origins: list[int] = []
    for index in indices.tolist():
        episode, trajectory = rewarded.episodes[index], rewarded.batch.trajectories[index]
        question = question_to(episode, trajectory.agent)
        if question is None:
            raise DataError(
                f"episode {episode.id!r}: agent {trajectory.agent!r} was shown no user message; a critic that reads "
                "answers needs the question, so keep the messages in the record"
            )
        if question not in prompts:
            prompts[question] = chat.encode(chat.render([Message("user", question)], generation_prompt=True))
        prompt = prompts[question]
        for turn in trajectory.turns:
            answer = trajectory.token_ids[turn.start : turn.stop]
            if any(trajectory.action_mask[turn.start : turn.stop]):
                mask = (*[False] * len(prompt), *[True] * len(answer))
                tokens = (*prompt, *answer)
                rows.append(Trajectory(trajectory.agent, "", tokens, mask, (0.0,) * len(tokens), ()))
                origins.append(index)
    all_rows = rewarded.batch
    groups, comparisons = all_rows.groups[origins].tolist(), all_rows.comparisons[origins].tolist()
    batch = collate_rows(rows, groups, comparisons, range(len(rows)))
    answered = torch.zeros_like(all_rows.action_mask).index_fill(0, indices, True)
    return batch, all_rows.action_mask & answered
