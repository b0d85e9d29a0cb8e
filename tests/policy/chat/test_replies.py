from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AddedToken, PreTrainedTokenizerFast

from mrlm_pl.episode import Message
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.chat.replies import GivenConversation
from mrlm_pl.policy.tiny import build_tokenizer


def demonstrated(chat: ChatFormat, *replies: str) -> GivenConversation:
    """Return a conversation of a question, a reply, and further ones."""
    conversation = GivenConversation(chat)
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
    """SentencePiece adds one to every text, including the reply's."""
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


def test_a_plain_reply_is_rendered_once_beside_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, rendered = ChatFormat(build_tokenizer()), list[str]()
    demonstrated(chat, "A")  # fills its cache
    render = chat.tokenizer.apply_chat_template
    monkeypatch.setattr(
        chat.tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(render(*a, **k)) or rendered[-1]
    )
    (row,) = demonstrated(chat, " B\n", "C").rows
    assert len(rendered) == 4
    assert chat.tokenizer.decode(row.token_ids).endswith("<|assistant|>C<|end|>")


@pytest.mark.parametrize(("last", "middle"), [("<think></think>", ""), ("", "|upper"), (" ", "|trim"), (" ", "")])
def test_a_plain_reply_is_its_content_however_the_template_writes_the_last_one(last: str, middle: str) -> None:
    """Qwen3 writes an empty reasoning in the last reply alone; a text that is never written whole is as it is."""
    reply = f"{{% if loop.last %}}{last}{{% endif %}}{{{{ m.content{middle} }}}}"
    written = f"{{% if m.role == 'assistant' %}}{reply}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    template = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{written}<|end|>{{% endfor %}}"
    chat = ChatFormat(build_tokenizer(), template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    (row,) = demonstrated(chat, "Ab").rows
    assert chat.tokenizer.decode(row.token_ids) == "<|user|>Q<|end|><|assistant|>Ab<|end|>"
