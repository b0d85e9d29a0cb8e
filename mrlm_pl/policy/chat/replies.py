"""Replies of data files: their text as a chat template writes them, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mrlm_pl.environment.tools import tool_message, with_written_calls
from mrlm_pl.episode import Message
from mrlm_pl.policy.chat.channels import channel_fields
from mrlm_pl.policy.chat.conversation import ChatFormat, Conversation
from mrlm_pl.policy.chat.tool_calls import QUESTION, SENTINEL, Tools, written_reply


@dataclass(frozen=True)
class GivenReply(Message):
    """A reply that was not sampled, whose calls and reasoning the template writes: they are not in its text."""

    reasoning: str = ""

    def to_chat(self) -> dict[str, Any]:
        names = ("reasoning_content", "thinking") if self.reasoning else ()  # gpt-oss reads the latter
        return super().to_chat() | dict.fromkeys(names, self.reasoning)


def _reasoning(reply: Message) -> str:
    return reply.reasoning if isinstance(reply, GivenReply) else ""


def _in_channels(reply: Message, chat: ChatFormat) -> Message:
    """Return a reply with the reasoning in its content apart, for the channels of the template, if it has any."""
    fields = channel_fields(replace(reply, tool_calls=()))
    # In a template with channels a call has no text.
    alone = chat.has_channels and bool(fields["content"]) != bool(reply.tool_calls) and not _reasoning(reply)
    parts = (fields["content"], reply.tool_calls)
    return GivenReply(reply.role, *parts, reasoning=fields["thinking"]) if alone and "thinking" in fields else reply


def plain_reply(reply: Message, chat: ChatFormat, tools: Tools) -> Message:
    """Return a reply that was not sampled with its calls and reasoning in the text, as the template writes them.

    Raises:
        ValueError: the template leaves out a part of the reply.
    """
    reply = _in_channels(reply, chat)
    if not isinstance(reply, GivenReply):
        return reply
    if chat.call_form is None:
        reply = replace(reply, content=with_written_calls(reply).content, tool_calls=())
    has_parts = reply.tool_calls or reply.reasoning
    return Message(reply.role, reply_text(reply, chat, tools) if has_parts else reply.content)


def reply_text(reply: Message, chat: ChatFormat, tools: Tools) -> str:
    """Return the text of a reply that was not sampled, between the generation prompt and the end of its turn.

    It is that before a next message, without the empty reasoning that some templates write in the last reply alone,
    unless the template leaves out a part of the reply there. A plain reply that the template never writes whole
    is as it is, after the tag that the prompt may end with.

    Raises:
        ValueError: the template leaves out a part of a reply with calls or reasoning.
    """

    def render(messages: Sequence[Message], prompt: bool) -> str:
        if reply in messages:
            return chat.render(messages, tools, generation_prompt=prompt, given=True)
        return chat.remembered(messages, tools, prompt)

    prompt, later = render([QUESTION], True), ""
    answers = [tool_message(call, "x") for call in reply.tool_calls] or [QUESTION]
    with suppress(Exception):  # templates raise errors of their own classes
        later = render([QUESTION, reply, *answers], True)
        begun, _, ended = render([QUESTION, Message("assistant", SENTINEL), QUESTION], True).partition(SENTINEL)
        written = later.removeprefix(prompt).removesuffix(ended)
        if begun == prompt and type(reply) is Message and written and written in (reply.content, reply.content.strip()):
            return written  # nearly all templates write a plain reply so; another rendering would take time
    question, header, text = written_reply(render, reply)
    left_out = _left_out(reply, header if question + header == prompt else None, text, chat, tools)
    if left_out and isinstance(reply, GivenReply):
        remedy = ", or write the reasoning in the content" if reply.reasoning else ""
        raise ValueError(f"the chat template leaves out {left_out}; give the policy another `chat_template`{remedy}")
    if left_out:
        content = reply.content
        sizes = range(min(len(content), len(prompt)), 0, -1)
        opened = (prompt, prompt.rstrip()) if content.startswith("<") else ()
        return next((content[size:] for text in opened for size in sizes if text.endswith(content[:size])), content)
    rest, least = later[len(question + header) :], len("".join(f"{reply.content}{_reasoning(reply)}".split()))
    begins = range(max(len(text) - least, 0) + 1)
    shortened = next((text[begin:] for begin in begins if rest.startswith(text[begin:])), "")
    return text if _left_out(reply, header, shortened, chat, tools) else shortened


def _left_out(reply: Message, header: str | None, text: str, chat: ChatFormat, tools: Tools) -> str:
    """Return the name of a part of a reply that is not in its text; empty if none.

    Args:
        reply: message of the assistant.
        header: text before the reply, which may open the reasoning; None if a generation prompt ends otherwise.
        text: text of the reply.
        chat: chat format with its template.
        tools: schemas of the tools.
    """
    words = "".join(f"{header or ''}{text}".split())
    calls = " with calls" * bool(reply.tool_calls)
    if "".join(reply.content.split()) not in words:
        return f"the text of a reply{calls}: {reply.content!r:.80}"
    reasoning = _reasoning(reply)
    if reasoning and (header is None or "".join(reasoning.split()) not in words):
        return f"the reasoning of a reply{calls}, or begins every reply without any: {reasoning!r:.80}"
    read = chat.call_form.read(text, tools) if reply.tool_calls and chat.call_form else ()
    return (
        f"some of the {len(reply.tool_calls)} calls of a reply: {text!r}" if len(read) < len(reply.tool_calls) else ""
    )


class GivenConversation(Conversation):
    """A conversation of a data file: :meth:`observe` and :meth:`demonstrate` alternate."""

    _text = ""  # of the row, to the end of the last reply

    def demonstrate(self, reply: Message, *, ends: bool = True) -> None:
        """Append an assistant turn from a demonstration; it counts as action.

        With ``ends`` it includes the token at the end of turns; a truncated turn has none, and some calls bring theirs.
        """
        reply = _in_channels(reply, self.chat)
        written = reply if isinstance(reply, GivenReply) else Message("assistant", reply.content)
        text = reply_text(written, self.chat, self.tools)
        # SentencePiece adds a space to every text: with that of the template around a reply there would be two.
        spaced = text.strip() == reply.content.strip() and not reply.content.startswith(" ")
        ids = self.chat.encode(text.removeprefix(" ") if spaced else text)
        if ends and not (ids and ids[-1] in self.chat.stop_ids):
            ids.append(self.chat.end_id)
            if self.chat.closing_ids[:1] == (self.chat.end_id,):
                text += self.chat.tokenizer.decode(ids[-1:])
        self.row.extend(ids, [0.0] * len(ids))
        self.row.messages, self._text = [*self.row.messages, reply], self.row.prompt + text

    def _prompt(self, messages: Sequence[Message]) -> str:
        as_written = any(isinstance(message, GivenReply) for message in messages)
        return self.chat.render(messages, self.tools, generation_prompt=True, given=as_written, plain=False)

    def _suffix(self, history: list[Message], prompt: str, new: int) -> str | None:
        last = self.row.token_ids[-1]
        end = self.chat.tokenizer.decode([last]) if last in self.chat.stop_ids else ""
        return prompt[len(self._text.removesuffix(end)) :] if prompt.startswith(self._text) else None
