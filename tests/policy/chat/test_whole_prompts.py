"""Whole prompts: they continue a row, branch from one, or begin one; sampled tokens are never encoded again."""

from __future__ import annotations

from mrlm_pl.episode import Message
from mrlm_pl.policy.chat import ChatFormat, Conversation
from mrlm_pl.policy.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
Q, R, S = (Message("user", text) for text in ("Q", "R", "S"))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def says(conversation: Conversation, text: str) -> Message:
    sampled = [*ids(text), TOKENIZER.eos_token_id]
    return conversation.act(sampled, [-0.5] * len(sampled))


def talk() -> Conversation:
    return Conversation(ChatFormat(TOKENIZER))


def shown(conversation: Conversation) -> list[str]:
    return [TOKENIZER.decode(row.token_ids) for row in conversation.rows]


def test_a_prompt_that_extends_a_row_gives_the_row_of_new_messages() -> None:
    whole, parts = talk(), talk()
    whole.resume([Q], [])
    parts.observe([Q])
    reply = says(whole, "a")
    assert says(parts, "a") == reply
    whole.resume([Q, reply, R], [])
    parts.observe([R])
    says(whole, "b"), says(parts, "b")
    assert whole.rows == parts.rows
    assert len(whole.rows) == 1


def test_a_retry_begins_a_row_with_the_same_prompt() -> None:
    conversation = talk()
    conversation.resume([Q], [])
    first = says(conversation, "a")
    conversation.resume([Q, first, R], [])
    says(conversation, "b")
    conversation.resume([Q, first, R], [])
    says(conversation, "c")
    one, two = conversation.rows
    prompt = "<|user|>Q<|end|><|assistant|>a<|end|><|user|>R<|end|><|assistant|>"
    assert shown(conversation) == [f"{prompt}b<|end|>", f"{prompt}c<|end|>"]
    assert (sum(one.action_mask), sum(two.action_mask)) == (4, 2), "turns of the first row do not count again"
    conversation.resume([Q, first, R, Message("assistant", "c"), S], [])
    assert conversation.row_index == 1, "the retry continues, not the first try"
    assert len(conversation.rows) == 2


def test_a_branch_keeps_the_sampled_tokens() -> None:
    conversation = talk()
    conversation.resume([Q], [])
    # "ab" sampled as <unk>: its text encodes to other tokens than those that were sampled.
    odd = conversation.act([TOKENIZER.unk_token_id, *ids("x"), TOKENIZER.eos_token_id], [-1.0] * 3)
    conversation.resume([Q, odd, R], [])
    says(conversation, "b")
    conversation.resume([Q, odd, S], [])
    start = len(ids("<|user|>Q<|end|><|assistant|>"))
    assert conversation.row.token_ids[start] == TOKENIZER.unk_token_id
    assert ids(odd.content)[:1] != [TOKENIZER.unk_token_id]
    assert conversation.row.messages == [Q, odd, S]
    assert not any(conversation.row.action_mask)


def test_an_edited_history_begins_an_empty_row() -> None:
    conversation = talk()
    conversation.resume([Q], [])
    says(conversation, "a")
    conversation.resume([Q, Message("assistant", "edited"), R], [])
    assert shown(conversation)[1] == "<|user|>Q<|end|><|assistant|>edited<|end|><|user|>R<|end|><|assistant|>"
    assert not any(conversation.row.action_mask)


def test_two_conversations_of_one_agent_take_turns() -> None:
    conversation = talk()
    conversation.resume([Q], [])
    a = says(conversation, "a")
    conversation.resume([S], [])
    b = says(conversation, "b")
    conversation.resume([Q, a, R], [])
    says(conversation, "c")
    conversation.resume([S, b, R], [])
    says(conversation, "d")
    end = "<|end|><|user|>R<|end|><|assistant|>"
    assert shown(conversation) == [
        f"<|user|>Q<|end|><|assistant|>a{end}c<|end|>",
        f"<|user|>S<|end|><|assistant|>b{end}d<|end|>",
    ]


def test_other_tools_begin_a_row() -> None:
    conversation = talk()
    conversation.resume([Q], [ADD])
    a = says(conversation, "a")
    conversation.resume([Q, a, R], [])
    assert len(conversation.rows) == 2
    says(conversation, "b")
    conversation.resume([Q, a, S], [ADD])
    assert (conversation.row_index, len(conversation.rows)) == (0, 2)


def test_a_template_that_rewrites_history_begins_one_row_for_a_branch() -> None:
    strips = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('/')[-1] }}<|end|>{% endfor %}<|assistant|>"
    conversation = Conversation(ChatFormat(TOKENIZER, strips))
    conversation.resume([Q], [])
    reply = says(conversation, "hm/a")
    conversation.resume([Q, reply, R], [])
    conversation.act(ids("b"), [-0.5])
    conversation.resume([Q, reply, S], [])
    assert [sum(row.action_mask) for row in conversation.rows] == [5, 1, 0]


def test_the_tokens_until_a_text_is_complete() -> None:
    chat = ChatFormat(TOKENIZER)
    assert chat.tokens_until(ids("abcdbc"), ["d", "bc"]) == 3
    assert chat.tokens_until(ids("abc"), ["x"]) is None
    assert chat.tokens_until(ids("abc"), ["c"]) == 3
