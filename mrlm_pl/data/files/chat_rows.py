"""Examples in data files, and their token rows: chats, plain text, scored answers and recorded episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrlm_pl.answers.records import REASONING
from mrlm_pl.environment.tools import call_of
from mrlm_pl.episode import ROLES, Message, ToolCall, Trajectory
from mrlm_pl.grouping import common_prefix
from mrlm_pl.policy import ChatFormat, Conversation
from mrlm_pl.policy.chat.replies import GivenConversation, GivenReply, plain_reply

DEMONSTRATOR = "demonstrator"
"""Agent of the rows that no policy sampled."""

_ARRAYS = {"token_ids": np.int32, "action_mask": np.bool_, "logprobs": np.float64}


class CompactTrajectory(Trajectory):
    """A trajectory that holds its tokens in arrays, 5 bytes for each and 8 more if it has log-probabilities.

    In tuples, which its fields are when they are read, a token takes about 60 bytes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, dtype in _ARRAYS.items():
            values: Any = np.array(vars(self).pop(name), dtype)
            vars(self)[f"_{name}"] = values if values.any() else np.broadcast_to(dtype(), values.shape)

    def __getattr__(self, name: str) -> Any:
        if name not in _ARRAYS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return tuple(vars(self)[f"_{name}"].tolist())


class Demonstration(NamedTuple):
    """A chat, or plain text without a chat template, of a data row.

    Attributes:
        given: first messages, which are no actions. The tool calls of replies are in ``tool_calls`` alone.
        shown: messages after them; those of the assistant are actions.
        plain: whether both are the text of a single message, which no chat template renders.
        tools: schemas of the agent's tools, as :meth:`ToolSchema.to_chat` returns them.
    """

    given: Sequence[Message]
    shown: Sequence[Message]
    plain: bool = False
    tools: Sequence[dict[str, Any]] = ()

    @property
    def messages(self) -> list[Message]:
        """All messages."""
        return [*self.given, *self.shown]

    @classmethod
    def of_text(cls, prompt: str, completion: str, tools: Any) -> Demonstration:
        """Return plain text as a user's message and its reply.

        Raises:
            ValueError: the row has tools.
        """
        if tools:
            raise ValueError(
                "plain text has no chat template that describes its tools; leave them out, or give lists of messages"
            )
        return cls([Message("user", prompt)], [Message("assistant", completion)], plain=True)

    def written(self, chat: ChatFormat) -> Demonstration:
        """Return the chat with the calls of its replies in their text, as a chat template writes them.

        Raises:
            ValueError: the template leaves out a part of a reply.
        """
        given, shown = (
            [plain_reply(message, chat, self.tools) for message in messages] for messages in (self.given, self.shown)
        )
        return self._replace(given=given, shown=shown)


def messages_of(messages: Any) -> list[Message]:
    """Return the messages of a data row.

    Raises:
        ValueError: the messages have a fault.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of {role, content}")
    parsed = []
    for message in messages:
        calls = _calls_of(message)
        text = "" if calls and message.get("content") is None else message.get("content")
        if message.get("role") not in ROLES or not isinstance(text, str):
            raise ValueError(f"{message!r} is not a message with a role and text as content")
        fields = (message["role"], text, calls, message.get("tool_call_id"), message.get("name"))
        if (weight := message.get("weight")) not in (None, 0, 1):
            raise ValueError(f"{message!r:.80} has the weight {weight!r}; it must be 0 (not trained on) or 1")
        reasoning = next(filter(None, map(message.get, REASONING)), "")
        if reasoning and (message["role"] != "assistant" or not isinstance(reasoning, str)):
            raise ValueError(f"its reasoning {reasoning!r:.80} must be text, and of an assistant message")
        parsed.append(GivenReply(*fields, reasoning) if reasoning or calls else Message(*fields))
    return parsed


def _calls_of(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message in OpenAI's form.

    Raises:
        ValueError: the tool calls have a fault.
    """
    if message.get("function_call"):  # of an earlier form, which would be left out
        raise ValueError(f"{message!r:.80} has a function_call; write it as tool_calls")
    written, calls = message.get("tool_calls") or [], []
    if written and message.get("role") != "assistant":
        raise ValueError(f"{message!r:.80} is not the assistant's and calls tools")
    for number, entry in enumerate(written if isinstance(written, list) else [written]):
        function = entry.get("function") if isinstance(entry, dict) else None
        call = call_of({**function, "id": entry.get("id")} if isinstance(function, dict) else None, number)
        if not isinstance(call, ToolCall):
            raise ValueError(
                f"its call {entry!r:.80} cannot be read: {call.fault}; write "
                '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
            )
        calls.append(call)
    return tuple(calls)


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a data row.

    Raises:
        ValueError: the tools have a fault.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ValueError(f"tools is {tools!r:.80}; it must be a list of schemas")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{tool!r:.80} is not a tool; write {{"type": "function", "function": {{"name": ..., ...}}}}'
            )
    return tools


def record_rows(records: Iterable[Demonstration | Trajectory], chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Return the token rows of demonstrations or recorded rows."""
    return [row for record in records for row in token_rows(record, chat, policy)]


def token_rows(example: Demonstration | Trajectory, chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Return the token rows of a demonstration or of a recorded row, several where the template rewrites history."""
    if isinstance(example, Trajectory):
        return played_rows(example, chat, policy)
    if example.plain:
        return [text_row(example.given[0].content, example.shown[0].content, chat, policy)]
    given, shown, _, tools = example if chat.writes_calls else example.written(chat)
    return chat_rows(given, shown, chat, policy, tools=tools)


def answer_row(answer: Demonstration | Trajectory, chat: ChatFormat, policy: str, field: str) -> Trajectory:
    """Return the token row of the answer in a field of a data row.

    Raises:
        ValueError: the chat template rewrites history, so that the answer is not a single row.
    """
    rows = token_rows(answer, chat, policy)
    if len(rows) != 1 or not rows[0].num_actions:
        raise ValueError(
            f"the {field!r} answer makes {len(rows)} rows of policy {policy!r}, as its template rewrites earlier "
            "messages; give answers of one assistant message, with the messages before it as `prompt`"
        )
    return rows[0]


def chat_rows(
    given: Sequence[Message],
    shown: Sequence[Message],
    chat: ChatFormat,
    policy: str,
    unended: Sequence[int] = (),
    tools: Sequence[dict[str, Any]] = (),
) -> list[Trajectory]:
    """Return the token rows of a chat, several where the chat template rewrites history.

    Args:
        given: first messages, which are no actions.
        shown: messages after them; those of the assistant are actions.
        chat: chat format of the learner.
        policy: name of the learner.
        unended: indices in ``shown`` of truncated messages, which have no end token.
        tools: schemas of the agent's tools, as :meth:`ToolSchema.to_chat` returns them.
    """
    conversation = GivenConversation(chat, tools)
    pending = list(given)
    for number, message in enumerate(shown):
        if message.role == "assistant":
            conversation.observe(pending)
            conversation.demonstrate(message, ends=number not in unended)
            pending = []
        else:
            pending.append(message)
    return [_demonstration(policy, row.token_ids, row.action_mask, row.messages) for row in conversation.rows]


def text_row(prompt: str, completion: str, chat: ChatFormat, policy: str) -> Trajectory:
    """Return the token row of plain text without a chat template; the completion and the EOS token are actions."""
    eos = chat.tokenizer.eos_token_id
    prompt_ids = chat.tokenizer.encode(prompt)
    prompt_ids = prompt_ids[:-1] if prompt_ids and prompt_ids[-1] == eos else prompt_ids
    shown = [*chat.encode(completion.removesuffix(chat.tokenizer.eos_token)), eos]
    mask = [False] * len(prompt_ids) + [True] * len(shown)
    return _demonstration(policy, prompt_ids + shown, mask, [Message("user", prompt), Message("assistant", completion)])


def scored_row(prompt: Sequence[Message], answer: Sequence[Message], chat: ChatFormat, policy: str) -> Trajectory:
    """Return the row of a conversation in the chat template without generation prompt; the answer is the action.

    These are the ids that :class:`~mrlm_pl.reward_models.RewardModel` scores: its score is the value before the last of
    them. The first action token is the first that differs from the rendered prompt, so the state before it depends on
    the prompt alone.

    Args:
        prompt: first messages.
        answer: messages that are scored.
        chat: chat format of the reward model.
        policy: name of the reward model.
    """
    ids = chat.encode(chat.render([*map(chat.plain, [*prompt, *answer])], generation_prompt=False))
    prompt_ids = chat.encode(chat.render([*map(chat.plain, prompt)], generation_prompt=True))
    shared = common_prefix(prompt_ids, ids[:-1])
    return _demonstration(policy, ids, [index >= shared for index in range(len(ids))], [*prompt, *answer])


def _demonstration(
    policy: str, token_ids: Sequence[int], action_mask: Sequence[bool], messages: Sequence[Message]
) -> Trajectory:
    """Return a row that no policy sampled."""
    logprobs = (0.0,) * len(token_ids)
    return CompactTrajectory(DEMONSTRATOR, policy, tuple(token_ids), tuple(action_mask), logprobs, (), tuple(messages))


def played_rows(row: Trajectory, chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Return the rows of a recorded row for a learner; its turns are actions.

    The sampled ids are kept when the learner's tokenizer and chat template give them for this conversation. Otherwise
    another model played, and the conversation is rendered again. A truncated turn has no end token either way.
    """
    replies = row.replies
    if not replies or len(replies) < len(row.turns):
        return []
    first = replies[0]
    if _fits(row, first, chat):
        return [dataclasses.replace(row, policy=policy)]
    shown = row.messages[first:]
    unended = [index - first for index, turn in zip(replies, row.turns, strict=True) if turn.finish_reason == "length"]
    return chat_rows(row.messages[:first], shown, chat, policy, unended)


def _fits(row: Trajectory, first: int, chat: ChatFormat) -> bool:
    """Return True if the learner's tokenizer and template would write this row around the same sampled tokens."""
    token_ids, logprobs, begin = row.token_ids, row.logprobs, row.turns[0].start
    prompt, rest = token_ids[:begin], token_ids[begin:]
    if not first or max(token_ids) >= len(chat.tokenizer):
        return False
    conversation = Conversation(chat)
    conversation.observe(row.messages[:first])
    written = len(conversation.row.token_ids)
    if conversation.row.token_ids != list(prompt) and not _ends_alike(prompt, row.messages[:first], chat):
        return False
    turns, pending = iter(row.turns), list[Message]()
    for message in row.messages[first:]:
        if message.role != "assistant":
            pending.append(message)
            continue
        if pending:
            conversation.observe(pending)
            pending = []
        turn = next(turns)
        heard = conversation.act(token_ids[turn.start : turn.stop], logprobs[turn.start : turn.stop])
        if heard.content != message.content:  # without the tools no calls are read
            return False
    if pending:
        conversation.observe(pending)
    return len(conversation.rows) == 1 and tuple(conversation.row.token_ids[written:]) == rest


def _ends_alike(prompt: Sequence[int], given: Sequence[Message], chat: ChatFormat) -> bool:
    """Return True if the learner would write a prompt like this from its last message on: tools come before it."""
    text = chat.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    rendered = chat.render(given, generation_prompt=True)
    begin = rendered.rfind(chat.plain(given[-1]).content.strip())
    written = 0 <= begin < len(rendered)  # the template writes the message as it is, and it is not empty
    return written and chat.encode(text) == list(prompt) and text.endswith(rendered[begin:])
