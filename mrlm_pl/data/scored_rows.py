"""Token rows of conversations that get a score: a question and the answer to it, as a reward model reads them."""

from __future__ import annotations

from collections.abc import Sequence

from mrlm_pl.data.chat_rows import DEMONSTRATOR
from mrlm_pl.episode import Message, Trajectory
from mrlm_pl.policy import ChatFormat


def scored_row(prompt: Sequence[Message], answer: Sequence[Message], chat: ChatFormat, policy: str) -> Trajectory:
    """The row of a conversation in the chat template without generation prompt; what follows the prompt acts.

    These are the very ids that :class:`~mrlm_pl.verifier.RewardModel` scores: its score is the value before the last of
    them. The first acting token is the first that differs from the rendered prompt, so the state before it depends on
    the prompt alone.

    Args:
        prompt: how the conversation begins.
        answer: what is scored.
        chat: of the model that scores.
        policy: its name.
    """
    ids = chat.encode(chat.render([*prompt, *answer], generation_prompt=False))
    given = chat.encode(chat.render(prompt, generation_prompt=True))
    shared = 0
    while shared < min(len(given), len(ids) - 1) and given[shared] == ids[shared]:
        shared += 1
    return Trajectory(
        agent=DEMONSTRATOR,
        policy=policy,
        token_ids=tuple(ids),
        action_mask=(False,) * shared + (True,) * (len(ids) - shared),
        logprobs=(0.0,) * len(ids),
        turns=(),
        messages=(*prompt, *answer),
    )
