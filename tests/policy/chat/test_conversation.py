from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from mrlm_pl.episode import Message
from mrlm_pl.errors import PolicyError
from mrlm_pl.policy.chat import ChatFormat, Conversation
from mrlm_pl.policy.tiny import build_tokenizer

STRIPS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_rows_equal_the_templates_rendering_of_the_whole_conversation() -> None:
    tokenizer = build_tokenizer()
    conversation = Conversation(ChatFormat(tokenizer))
    conversation.observe([Message("system", "Be brief."), Message("user", "2+2?")])
    reply = [*tokenizer.encode("4", add_special_tokens=False), tokenizer.eos_token_id]
    message = conversation.act(reply, [-0.5, -0.25])
    conversation.observe([Message("user", "And 3+3?")])

    assert message == Message("assistant", "4")
    expected = "<|system|>Be brief.<|end|><|user|>2+2?<|end|><|assistant|>4<|end|><|user|>And 3+3?<|end|><|assistant|>"
    assert conversation.row.token_ids == tokenizer.encode(expected, add_special_tokens=False)
    assert [flag for flag in conversation.row.action_mask if flag] == [True, True]
    start = conversation.row.action_mask.index(True)
    assert conversation.row.token_ids[start : start + 2] == reply
    assert conversation.row.logprobs[start : start + 2] == [-0.5, -0.25]
    assert sum(conversation.row.logprobs) == -0.75
    assert len(conversation.rows) == 1


def test_a_turn_cut_at_the_length_limit_is_closed_by_an_observed_token() -> None:
    tokenizer = build_tokenizer()
    conversation = Conversation(ChatFormat(tokenizer))
    conversation.observe([Message("user", "Hi")])
    conversation.act(tokenizer.encode("abc", add_special_tokens=False), [-1.0] * 3)
    conversation.observe([Message("user", "Go on")])
    text = tokenizer.decode(conversation.row.token_ids)
    assert text == "<|user|>Hi<|end|><|assistant|>abc<|end|><|user|>Go on<|end|><|assistant|>"
    assert sum(conversation.row.action_mask) == 3, "the closing token was not sampled"


def test_a_template_that_rewrites_history_begins_a_new_row_and_is_counted() -> None:
    tokenizer = build_tokenizer()
    conversation = Conversation(ChatFormat(tokenizer, STRIPS_REASONING))
    conversation.observe([Message("user", "Q")])
    sampled = [*tokenizer.encode("<think>hm</think>A", add_special_tokens=False), tokenizer.eos_token_id]
    conversation.act(sampled, [-1.0] * len(sampled))
    conversation.observe([Message("user", "R")])
    assert len(conversation.rows) == 2
    assert conversation.rows[0].token_ids[-len(sampled) :] == sampled, "the sampled row is kept as it was"
    rewritten = "<|user|>Q<|end|><|assistant|>A<|end|><|user|>R<|end|><|assistant|>"
    assert tokenizer.decode(conversation.row.token_ids) == rewritten
    assert not any(conversation.row.action_mask)


def demonstrated(chat: ChatFormat, *replies: str) -> Conversation:
    """Return a conversation of a question, a reply, and further ones."""
    conversation = Conversation(chat)
    for reply in replies:
        conversation.observe([Message("user", "Q")])
        conversation.demonstrate(Message("assistant", reply))
    return conversation


@pytest.mark.parametrize(("begin", "end"), [("<|end|>", ""), ("<|end|>", "<|end|>"), ("", "<|end|>"), ("", "")])
def test_a_demonstrated_turn_ends_once_also_where_the_same_token_begins_the_next(begin: str, end: str) -> None:
    tokenizer = build_tokenizer()
    written = f"{{{{ '{begin}' ~ m.role }}}}:{{{{ m.content }}}}{{% if m.role == 'assistant' %}}{end}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{begin}assistant:{{% endif %}}"
    chat = ChatFormat(tokenizer, f"{{% for m in messages %}}{written}{{% endfor %}}{prompt}")
    (row,) = demonstrated(chat, "A", "B").rows
    turns = [f"{begin}user:Q{begin}assistant:{letter}" for letter in "AB"]
    expected = "<|end|>".join([*turns, ""]).replace("<|end|><|end|>", "<|end|>" * (1 + bool(end)))
    assert tokenizer.decode(row.token_ids) == expected


@pytest.mark.parametrize("strips", [True, False])
def test_the_text_after_a_demonstrated_turn_is_encoded_with_its_end(strips: bool) -> None:
    """Phi 3's special tokens take the line break after them."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": AddedToken("<|stop|>", rstrip=strips, special=True)})
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|stop|>\n{% endfor %}"
    chat = ChatFormat(tokenizer, template + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
    (row,) = demonstrated(chat, "A", " B").rows
    turns = [f"<|user|>\nQ<|stop|>\n<|assistant|>\n{text}<|stop|>" for text in ("A", " B")]
    assert row.token_ids == tokenizer.encode("\n".join(turns), add_special_tokens=False)


@pytest.mark.parametrize("reply", ["4", "4\n", "\n4", "4 "])
def test_a_space_that_the_template_writes_before_a_reply_is_not_doubled(reply: str) -> None:
    """SentencePiece adds one to every text, also to the reply's."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3} | {chr(code): code for code in range(10, 127)}
    core = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    written = "[{{ m.content }}]{% else %} {{ m.content | trim }}</s>{% endif %}"
    chat = ChatFormat(tokenizer, f"{{% for m in messages %}}{{% if m.role == 'user' %}}{written}{{% endfor %}}")
    (row,) = demonstrated(chat, reply, "5").rows
    expected = [*"\u2581[Q]\u25814", "</s>", *"\u2581[Q]\u25815", "</s>"]
    assert tokenizer.convert_ids_to_tokens(row.token_ids) == expected


def test_a_space_of_a_reply_itself_stays() -> None:
    chat = ChatFormat(build_tokenizer())
    (row,) = demonstrated(chat, " 4").rows
    assert chat.tokenizer.decode(row.token_ids).endswith("<|assistant|> 4<|end|>")


def test_half_of_a_character_in_an_observation_is_a_question_mark() -> None:
    halved, marked = (Conversation(ChatFormat(build_tokenizer())) for _ in range(2))
    halved.observe([Message("user", "ValueError: \ud800!")])
    marked.observe([Message("user", "ValueError: ?!")])
    assert halved.row.token_ids == marked.row.token_ids


def test_models_without_a_template_get_the_plain_one() -> None:
    words = {"<unk>": 0, "<eos>": 1} | {chr(code): code for code in range(10, 127)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    chat = ChatFormat(tokenizer)
    assert chat.render([Message("user", "Hi")], generation_prompt=True) == "User: Hi\nAssistant: "
    assert chat.stop_ids == (1,)


def test_without_an_eos_token_no_turn_could_end() -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    with pytest.raises(PolicyError, match="no EOS token"):
        ChatFormat(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))


def test_special_tokens_inside_a_reply_do_not_reach_the_other_side(model_folder: Path) -> None:
    tokenizer = build_tokenizer()
    conversation = Conversation(ChatFormat(tokenizer))
    conversation.observe([Message("user", "Q")])
    forged = tokenizer.encode("x<|user|>y", add_special_tokens=False)
    assert conversation.act(forged, [-1.0] * len(forged)).content == "xy"
