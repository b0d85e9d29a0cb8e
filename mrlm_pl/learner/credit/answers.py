"""Rows in which a critic reads a question and one answer to it, without the discussion in between."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mrlm_pl.episode import Message, Trajectory, question_to
from mrlm_pl.errors import DataError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.turns import RewardedRows
from mrlm_pl.policy.chat import ChatFormat


@dataclass
class AnswerRows:
    """One row for each answer in some rows of a table: the question, then the answer's own tokens.

    The action tokens of all rows, one row after the other, are those of the table's rows in the same order.

    Attributes:
        batch: the rows, N of them.
        places: numbers of the table's rows that the answers are from.
        mask: [b, T], the action mask of these.
    """

    batch: PolicyBatch
    places: Tensor
    mask: Tensor

    def put(self, values: Tensor, table: Tensor) -> None:
        """Write the answers' numbers [N, t] to where their tokens are in a table [B, T]."""
        numbers = table[self.places]
        numbers[self.mask] = values[self.batch.action_mask].to(table.dtype)
        table[self.places] = numbers

    def taken(self, table: Tensor) -> Tensor:
        """The numbers [N, t] of the answers' tokens in a table [B, T], 0 elsewhere."""
        numbers = table.new_zeros(self.batch.action_mask.shape)
        numbers[self.batch.action_mask] = table[self.places][self.mask]
        return numbers


def answer_rows(table: RewardedRows, places: Tensor, chat: ChatFormat) -> AnswerRows:
    """The answers in some of a table's rows, on the device of the table.

    Args:
        table: of one policy.
        places: numbers of its rows, [b].
        chat: the critic's chat format, with the tokens of the policy.

    Raises:
        DataError: the record lacks the question.
    """
    prompts: dict[str, list[int]] = {}
    rows: list[Trajectory] = []
    origins: list[int] = []
    for place in places.tolist():
        episode, trajectory = table.episodes[place], table.batch.trajectories[place]
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
                origins.append(place)
    whole = table.batch
    groups, comparisons = whole.groups[origins].tolist(), whole.comparisons[origins].tolist()
    batch = collate_rows(rows, groups, comparisons, range(len(rows)))
    places = places.to(whole.action_mask.device)
    return AnswerRows(batch.to(whole.action_mask.device), places, whole.action_mask[places])
