"""Rows of scored conversations: the ids of the whole rendering, and where the answer begins in them."""

from __future__ import annotations

import pytest

from mrlm_pl.data.scored_rows import scored_row
from mrlm_pl.episode import Message
from mrlm_pl.policy import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
# As Qwen's: a turn ends with a line break after its end token.
LINES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As reasoning models': the generation prompt opens a thought that a rendered history does not have.
THINKS = LINES.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n[think]{% endif %}")


@pytest.mark.parametrize(
    ("template", "given", "acting"),
    [
        (None, "<|user|>2+2?<|end|><|assistant|>", "4<|end|>"),
        (LINES, "<|user|>\n2+2?<|end|>\n<|assistant|>\n", "4<|end|>\n"),
        (THINKS, "<|user|>\n2+2?<|end|>\n<|assistant|>\n", "4<|end|>\n"),
    ],
)
def test_the_row_is_the_whole_rendering_and_the_answer_acts(template: str | None, given: str, acting: str) -> None:
    chat = ChatFormat(TOKENIZER, template)
    messages = (Message("user", "2+2?"), Message("assistant", "4"))
    row = scored_row(messages[:1], messages[1:], chat, "main")
    assert list(row.token_ids) == chat.encode(chat.render(messages, generation_prompt=False))
    parts = {
        acts: TOKENIZER.decode(
            [token for token, own in zip(row.token_ids, row.action_mask, strict=True) if own == acts]
        )
        for acts in (False, True)
    }
    assert parts == {False: given, True: acting}
    assert row.messages == messages


def test_an_empty_answer_acts_with_its_end() -> None:
    row = scored_row([Message("user", "2+2?")], [Message("assistant", "")], ChatFormat(TOKENIZER), "main")
    assert row.num_actions == 1
