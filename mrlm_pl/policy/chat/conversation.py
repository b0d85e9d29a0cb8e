"""Chat to tokens: the only place that tokenizes.

A conversation grows by appending. Sampled token ids stay unchanged; new messages alone are rendered with the model's
chat template, as a suffix of the row. So the learner trains on exactly the tokens that the sampler saw and drew. A
template that rewrites history (for example one that strips earlier reasoning) cannot be extended: the conversation then
begins a new row, which is counted.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from mrlm_pl.environment.tools import tool_instructions, tool_message
from mrlm_pl.episode import REASONING, Message, final_text, reasoning_text
from mrlm_pl.errors import PolicyError
from mrlm_pl.policy.chat.channels import CALL, CHANNEL, channel_fields, without_channels
from mrlm_pl.policy.chat.limits import EndlessTemplateError, check_template, deadline
from mrlm_pl.policy.chat.template import PLAIN_TEMPLATE
from mrlm_pl.policy.chat.tool_calls import (
    PROBE_CALL,
    PROBE_TOOL,
    QUESTION,
    SENTINEL,
    CallForm,
    JSONForm,
    Tools,
    find_call_form,
)

MAX_REMEMBERED = 256
"""Maximum number of rendered texts that a chat format remembers, about three for each set of tools."""

MAX_PROMPTS = 32
"""Maximum number of texts whose tokens a chat format remembers, as the episodes of a group share their prompt."""

logger = logging.getLogger(__name__)


class ChatFormat:
    """Renders messages for one tokenizer.

    Args:
        tokenizer: tokenizer of ``transformers``.
        template: Jinja chat template that replaces the tokenizer's own; without either, ``PLAIN_TEMPLATE``.
        extra_stop_ids: extra tokens that end a turn, such as those of the model's generation config.

    Raises:
        PolicyError: the tokenizer has no EOS token, so that no turn could end, or the template drops the text of
            assistants, does not end, or might not end.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, extra_stop_ids: Sequence[int] = ()) -> None:
        if tokenizer.eos_token_id is None:
            raise PolicyError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token; "
                "set `eos_token` in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template or PLAIN_TEMPLATE
        check_template(self.template, tokenizer.name_or_path)
        self._endless: EndlessTemplateError | None = None
        added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special_ids, self._extra_stop_ids = {*tokenizer.all_special_ids, *added}, tuple(extra_stop_ids)
        self._remembered: dict[str, str] = {}
        self._encoded: dict[str, list[int]] = {}
        self._warned_of_tokens = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        generation_prompt: bool,
        given: bool = False,
        plain: bool = True,
    ) -> str:
        """Return the text of a conversation, with ``generation_prompt`` including the assistant's header.

        With ``given`` the template gets the messages as they are, else the calls of replies in their text alone, and
        with ``plain`` what others wrote as :meth:`plain` returns it.
        """
        chat = [message.to_chat() for message in messages] if given else self._template_messages(messages, plain)
        if self._endless is not None:  # probes of the template continue after an error
            raise self._endless
        try:
            with deadline(self.tokenizer.name_or_path):
                return self.tokenizer.apply_chat_template(
                    chat,
                    tools=list(tools) or None,
                    chat_template=self.template,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                )
        except EndlessTemplateError as error:
            self._endless = error
            raise

    def remembered(self, messages: Sequence[Message], tools: Tools, generation_prompt: bool) -> str:
        """Return the text of given messages that recur with the same tools."""
        key = repr(([*messages], [*tools], generation_prompt))
        text = self._remembered.get(key)
        if text is None:
            text = self.render(messages, tools, generation_prompt=generation_prompt, given=True)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = text
        return text

    def describes_tools(self, tools: Tools) -> bool:
        """Return whether the template describes tools to the model, with calls in a readable form."""
        if self.call_form is None:
            return False
        text = self.remembered([QUESTION], tools, True)  # nearly all conversations of a run have the same tools
        return all(tool["function"]["name"] in text for tool in tools)

    def heard(self, token_ids: Sequence[int], tools: Tools, prompt: str = "") -> Message:
        """Return a sampled turn as the assistant's message: its text, and its tool calls in the template's own form.

        Stop token and special tokens are not part of the text; calls may contain them. The text begins with the
        ``<think>`` that a template writes at the end of the prompt, so that reasoning without an end is known as such.
        """
        spoken = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        opened = opened_reasoning(prompt)
        text = marked = opened + self.decode(spoken)
        form = self.call_form if tools else None
        if (form or self.has_channels) and not self._special_ids.isdisjoint(spoken):
            marked = self.tokenizer.decode(spoken, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            marked = opened + marked
        if self.has_channels:
            text = marked = self._special_pattern.sub("", without_channels(marked))
            form = form and JSONForm("<tool_call>")
        return Message("assistant", text, () if form is None else form.read(marked, tools))

    @cached_property
    def has_channels(self) -> bool:
        """True if the template writes replies in channels, as that of gpt-oss does."""
        return CHANNEL in self.template

    @cached_property
    def call_form(self) -> CallForm | None:
        """Form of the template's tool calls; None if it has none, or one that cannot be parsed.

        A template that mentions tools without such a form is logged as a warning: the prompt then has the tools twice.
        """
        form = find_call_form(lambda messages, prompt: self.remembered(messages, [PROBE_TOOL], prompt))
        if form is None and PROBE_TOOL["function"]["name"] in self._probe_prompt(QUESTION):
            logger.warning(
                "the chat template of %s names the tools, but writes no `tool_calls` of an assistant in a form that "
                "can be read back; the tools and the form of calls are described again before the first message",
                self.tokenizer.name_or_path or "the policy",
            )
        return form

    @cached_property
    def writes_calls(self) -> bool:
        """True if the template writes ``tool_calls`` and accepts results of tools after them."""
        call, answer = Message("assistant", "", (PROBE_CALL,)), tool_message(PROBE_CALL, SENTINEL)
        return self.call_form is not None and SENTINEL in self._probe_prompt(QUESTION, call, answer)

    def _probe_prompt(self, *messages: Message) -> str:
        """Return the prompt of messages with a tool; empty where the template rejects them."""
        try:
            return self.remembered(messages, [PROBE_TOOL], True)
        except Exception:  # templates raise errors of their own classes
            return ""

    @cached_property
    def _takes_results(self) -> bool:
        """True if the template accepts results of tools after a reply with the calls in its text."""
        answer = tool_message(PROBE_CALL, SENTINEL)
        text = self._probe_prompt(QUESTION, Message("assistant", "y"), answer, Message("assistant", "z"), answer)
        return text.count(SENTINEL) == 2

    def _template_messages(self, messages: Sequence[Message], plain: bool) -> list[dict[str, Any]]:
        """Return messages for the template: replies with their calls in the text, results of tools in some role."""
        chat: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            if plain and message.role in ("user", "tool"):
                message = self.plain(message)
            shown = message.to_chat()
            if message.role == "assistant":
                shown.pop("tool_calls", None)
                if self.has_channels:
                    shown |= channel_fields(message)
            # In channels a result follows its call.
            elif message.role == "tool" and not (self._takes_results or (chat and "tool_calls" in chat[-1])):
                shown = {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
                if index and messages[index - 1].role == "tool":  # users and assistants alternate in some templates
                    shown["content"] = f"{chat.pop()['content']}\n{shown['content']}"
            chat.append(shown)
        return chat

    def plain(self, message: Message) -> Message:
        """Return a message with a space in the special tokens that are spelled in its text.

        The tokenizer would read them as the template's own: an agent could forge messages to its partner or judge.
        """
        pieces, start = [], 0
        while match := self._special_pattern.search(message.content, start):
            pieces.append(message.content[start : match.start() + 1])
            start = match.start() + 1  # tokens may overlap
            if not self._warned_of_tokens:
                self._warned_of_tokens = True
                logger.warning(
                    "a message spells the special token %r: it is read with a space after its first character, here "
                    "and in later messages, since it could forge other messages",
                    match[0],
                )
        return replace(message, content=" ".join([*pieces, message.content[start:]])) if pieces else message

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """The tokens of more than a character that are special, or that the template writes around messages."""
        ids, vocabulary = set(self._special_ids), self.tokenizer.added_tokens_decoder
        with suppress(Exception):  # templates raise errors of their own classes
            exchange = [Message("user", SENTINEL), Message("assistant", SENTINEL), Message("user", SENTINEL)]
            text = self.render(exchange, generation_prompt=False, given=True)
            written = vocabulary.keys() & self.encode(text.partition(SENTINEL)[2])  # DeepSeek's roles are not special
            ids.update(number for number in written if not vocabulary[number].content.isalnum())
        tokens = (token for token in self.tokenizer.convert_ids_to_tokens(sorted(ids)) if len(token.strip()) > 1)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text`` without additional special tokens; a lone surrogate is read as ``?``."""
        ids = self._encoded.get(text)
        if ids is None:
            # Programs of policies can write half of a character into an observation, and tokenizers reject it.
            ids = self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)
            if len(self._encoded) >= MAX_PROMPTS:
                self._encoded.clear()
            self._encoded[text] = ids
        return [*ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token within ``token_ids``; special ones have theirs."""
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        before = self.tokenizer.encode("a", add_special_tokens=False)  # many decoders omit a space at the beginning
        skip = len(decode(before))
        return [decode([*before, token])[skip:] if place else decode([token]) for place, token in enumerate(token_ids)]

    def tokens_until(self, token_ids: Sequence[int], stops: Sequence[str]) -> int | None:
        """Return the number of tokens until one of the texts is complete, or None if none occurs."""

        def complete(count: int) -> bool:
            text = self.decode(token_ids[:count])
            return any(stop in text for stop in stops)

        least = bisect_left(range(len(token_ids) + 1), True, key=complete)
        return least if least <= len(token_ids) else None

    def reasoning_tokens(self, token_ids: Sequence[int], reply: str) -> int:
        """Return how many of a reply's tokens come before the text after its reasoning; 0 without reasoning."""
        if not reasoning_text(reply):
            return 0
        if not (text := final_text(reply)):
            return len(token_ids)
        lost = bisect_left(range(len(token_ids)), True, key=lambda start: text not in self.decode(token_ids[start:]))
        return max(lost - 1, 0)  # calls in channels are not in the reply as they were sampled

    @cached_property
    def closing_ids(self) -> tuple[int, ...]:
        """The template's tokens after an assistant message."""
        text = self.render([QUESTION, Message("assistant", SENTINEL)], generation_prompt=False)
        _, sentinel, closing = text.partition(SENTINEL)
        if not sentinel:
            raise PolicyError(
                f"the chat template of {self.tokenizer.name_or_path!r} drops the assistant's text; "
                "give the policy another `chat_template`"
            )
        return tuple(self.encode(closing))

    @cached_property
    def end_id(self) -> int:
        """The token at the end of an assistant's turn: the template's own if it is a special one, else EOS."""
        special = self._special_ids.union(self.tokenizer.added_tokens_decoder)
        return next((first for first in self.closing_ids[:1] if first in special), self.tokenizer.eos_token_id)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn when sampled."""
        calls = [number for number, token in self.tokenizer.added_tokens_decoder.items() if token.content == CALL]
        return tuple(dict.fromkeys((self.end_id, self.tokenizer.eos_token_id, *self._extra_stop_ids, *calls)))


@dataclass(frozen=True)
class Mark:
    """A place in a row at which a conversation can continue: after a prompt, or after a sampled turn.

    Args:
        messages: number of the row's messages before the mark.
        tokens: number of the row's tokens before the mark.
        sampled: True after a sampled turn.
    """

    messages: int
    tokens: int
    sampled: bool

    def leads_to(self, history: Sequence[Message], row: Row) -> bool:
        """Return whether a prompt begins with the row's messages up to here; a retry has no others."""
        fits = self.messages < len(history) if self.sampled else self.messages == len(history)
        return fits and row.messages[: self.messages] == history[: self.messages]


@dataclass
class Row:
    """A token row under construction: T ids, True at sampled ones, and their log-probabilities.

    Attributes:
        tools: schemas that the row's prompts describe.
        prompt: text of the last prompt.
        marks: places where a conversation can continue.
    """

    token_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    marks: list[Mark] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append observed tokens, or, with ``logprobs``, sampled ones."""
        self.token_ids.extend(token_ids)
        self.action_mask.extend([logprobs is not None] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids) if logprobs is None else logprobs)

    def fork(self) -> Row:
        """Return an independent copy."""
        tokens = list(self.token_ids), list(self.action_mask), list(self.logprobs)
        return Row(*tokens, self.messages, self.tools, self.prompt, list(self.marks))

    def mark(self, sampled: bool) -> None:
        """Note that a conversation can continue here."""
        self.marks.append(Mark(len(self.messages), len(self.token_ids), sampled))

    def branch(self, mark: Mark) -> Row:
        """Return a row with the tokens up to a mark; none of them counts as sampled again."""
        row = Row(messages=self.messages[: mark.messages], tools=self.tools)
        row.extend(self.token_ids[: mark.tokens])
        row.marks = self.marks[: self.marks.index(mark) + 1]
        return row


class Conversation:
    """One agent's dialogue as token rows: :meth:`observe` or :meth:`resume`, and :meth:`act` alternate.

    Attributes:
        rows: token rows; several only if the template rewrote history, or whole prompts did not extend one row.
        row_index: index of the current row.
    """

    def __init__(self, chat: ChatFormat, tools: Tools = ()) -> None:
        self.chat, self.tools = chat, tuple(tools)
        self.rows: list[Row] = [Row(tools=self.tools)]
        self.row_index = 0

    @property
    def row(self) -> Row:
        """Current row."""
        return self.rows[self.row_index]

    def fork(self) -> Conversation:
        """Return an independent copy of the conversation."""
        copied = Conversation(self.chat, self.tools)
        copied.rows, copied.row_index = [row.fork() for row in self.rows], self.row_index
        return copied

    def observe(self, messages: Sequence[Message]) -> None:
        """Append new messages and the template's generation prompt."""
        if not self.row.messages:
            messages = self._with_tools(messages)
        self._extend([*self.row.messages, *messages], len(messages))

    def resume(self, messages: Sequence[Message], tools: Tools) -> None:
        """Continue the row that a whole prompt extends, else begin one; no sampled token is encoded again.

        Args:
            messages: messages of the prompt.
            tools: tools that the prompt describes; a row has the same ones throughout.
        """
        self.tools = tuple(tools)
        history = self._with_tools(messages)
        rows = [(index, row) for index, row in enumerate(self.rows) if row.tools == self.tools]
        matches = [(mark, index) for index, row in rows for mark in row.marks if mark.leads_to(history, row)]
        if not matches:
            if self.row.token_ids:
                self._begin(Row(tools=self.tools))
            self.row.tools = self.tools
            self._extend(history, len(history))
            return
        mark, self.row_index = max(matches, key=lambda at: (at[0].tokens, at[0] is self.rows[at[1]].marks[-1]))
        if mark is not self.row.marks[-1]:
            self._begin(self.row.branch(mark))
            prompt = history[: mark.messages - mark.sampled]
            self.row.prompt = self._prompt(prompt)
        if mark.sampled:
            self._extend(history, len(history) - mark.messages)

    def _with_tools(self, messages: Sequence[Message]) -> list[Message]:
        """Return the first messages of a row, with the tools where the template does not describe them."""
        if not self.tools or self.chat.describes_tools(self.tools):
            return [*messages]
        first = messages[0]
        return [Message(first.role, f"{tool_instructions(self.tools)}\n\n{first.content}"), *messages[1:]]

    def _begin(self, row: Row) -> None:
        self.row_index = len(self.rows)
        self.rows.append(row)

    def _prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of messages and the generation prompt."""
        return self.chat.render(messages, self.tools, generation_prompt=True)

    def _extend(self, history: list[Message], new: int) -> None:
        """Append the tokens of a prompt, whose last ``new`` messages the row does not have yet."""
        prompt = self._prompt(history)
        suffix = self._suffix(history, prompt, new) if self.row.token_ids else prompt
        if suffix is None:
            suffix = prompt
            if any(self.row.action_mask):
                self._begin(Row(tools=self.tools))
            else:  # a branch without turns of its own
                self.rows[self.row_index] = Row(tools=self.tools)
        ids = self.chat.encode(suffix)
        # A turn usually ends with the template's next token.
        self.row.extend(ids[1:] if ids[:1] == self.row.token_ids[-1:] else ids)
        self.row.messages, self.row.prompt = history, prompt
        self.row.mark(sampled=False)

    def act(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Message:
        """Append a sampled turn and return it as the assistant's message, without the stop token.

        With tools, calls in the template's own form are in its ``tool_calls`` and in its text.
        """
        self.row.extend(token_ids, logprobs)
        message = self.chat.heard(token_ids, self.tools, self.row.prompt)
        self.row.messages = [*self.row.messages, message]
        self.row.mark(sampled=True)
        return message

    def _suffix(self, history: list[Message], prompt: str, new: int) -> str | None:
        """Return the text from the end of the last assistant turn on; None if the template changed that before it."""
        last, before = len(history) - new - 1, self.row.prompt.rstrip()
        spoken = history[last].content.removeprefix(opened_reasoning(self.row.prompt)).strip()
        marked = [*history[:last], Message("assistant", SENTINEL), *history[last + 1 :]]
        _, _, suffix = self._prompt(marked).partition(SENTINEL)
        unchanged = prompt.startswith(before) and prompt.endswith(suffix)
        return suffix if unchanged and prompt[len(before) : len(prompt) - len(suffix)].strip() == spoken else None


def opened_reasoning(prompt: str) -> str:
    """Return the ``<think>`` at the end of a prompt, with the space behind it; empty without one.

    >>> opened_reasoning("<|assistant|><think>\\n"), opened_reasoning("<|assistant|><think>\\n\\n</think>")
    ('<think>\\n', '')
    """
    text = prompt.rstrip()
    return prompt[len(text) - len(REASONING) :] if text.endswith(REASONING) else ""
