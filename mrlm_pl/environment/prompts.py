"""Whole conversations as observations, for environments whose conversations are kept elsewhere, and replies to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrlm_pl.environment.contract import ToolSchema
from mrlm_pl.episode import Message


@dataclass(frozen=True)
class Prompt(Sequence[Message]):
    """An observation that is the whole conversation, instead of new messages.

    It continues the agent's trajectory whose messages it extends. One that leaves a trajectory earlier, such as a
    retry, begins another trajectory with the same tokens up to there; any other begins an empty one.

    Args:
        messages: whole conversation, including replies of the agent as it received them from the player.
        tools: tools that the agent may call in this decision.
        max_tokens: maximum number of tokens of the reply, if below the sampling's.
        stop: texts after which the reply ends; the token that completes one is its last.
        logprobs: whether the reply names its sampled tokens.

    Attributes:
        refusals: reasons why there is no reply, from a player that leaves the episode because the prompt exceeds the
            context.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    refusals: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, index: Any) -> Any:
        return self.messages[index]


@dataclass(frozen=True)
class Reply(Message):
    """The reply to a :class:`Prompt`.

    Args:
        finish_reason: ``stop`` or ``length``.
        prompt_tokens: number of tokens of the conversation before it.
        tokens: number of sampled tokens.
        reasoning_tokens: number of them before the text that follows the reasoning.
        sampled: the text and the log-probability of each, if the prompt asks for them.
    """

    finish_reason: str = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    reasoning_tokens: int = 0
    sampled: tuple[tuple[str, float], ...] = ()

    @property
    def message(self) -> Message:
        """The reply as it is in a conversation."""
        return Message(self.role, self.content, self.tool_calls, self.tool_call_id, self.name)
