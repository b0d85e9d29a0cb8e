"""The chat templates of common model families: the table of docs/data/chat_templates.md, and their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from mrlm_pl.environment.tools import MalformedCall, requested_calls, tool_message, with_written_calls
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.chat import ChatFormat, Conversation, template_variables
from mrlm_pl.policy.chat.replies import GivenConversation, GivenReply
from mrlm_pl.policy.chat.template import with_arguments
from mrlm_pl.policy.chat.tool_calls import JSONForm
from mrlm_pl.policy.tiny import build_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
PAGE = Path(__file__).parents[3] / "docs" / "data" / "chat_templates.md"
TOKENIZER = build_tokenizer()
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
REASONING = "<think>\nhm\n</think>\n\n"
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("Qwen 2.5", "qwen2.5", {}),
    ("Qwen3", "qwen3", {}),
    ("Qwen3, `enable_thinking: false`", "qwen3", {"enable_thinking": False}),
    ("DeepSeek-R1 distilled", "deepseek_r1_distill", {}),
    ("GLM-4.5", "glm4.5", {}),
    ("GLM-4.5, `enable_thinking: false`", "glm4.5", {"enable_thinking": False}),
    ("gpt-oss", "gpt_oss", {}),
    ("Llama 3.1", "llama3.1", {}),
    ("Gemma 2", "gemma2", {}),
    ("Phi 3.5", "phi3.5", {}),
    ("Mistral 7B v0.3", "mistral_v0.3", {}),
]


def template(name: str, **arguments: Any) -> str:
    return with_arguments((TEMPLATES / f"{name}.jinja").read_text(), arguments, name)


def restarts(chat: ChatFormat, reply: str, *, system: bool = False, tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return whether the next message begins a new row after this reply."""
    conversation = Conversation(chat, tools)
    conversation.observe([*[Message("system", "SYS")] * system, Message("user", "Q")])
    ids = [*TOKENIZER.encode(reply, add_special_tokens=False), chat.end_id]
    conversation.act(ids, [-1.0] * len(ids))
    answer = Message("tool", "3", tool_call_id="call00000", name="add") if tools else Message("user", "R")
    conversation.observe([answer])
    return "new row" if len(conversation.rows) > 1 else "extends"


def system_message(chat: ChatFormat) -> str:
    try:
        text = chat.render([Message("system", "SYS"), Message("user", "USR")], generation_prompt=True)
    except jinja2.TemplateError:
        return "rejected"
    between = text.partition("SYS")[2].partition("USR")[0]
    return "kept" if between.strip() else "in the last user message"


def row(label: str, name: str, arguments: dict[str, Any]) -> str:
    chat = ChatFormat(TOKENIZER, template(name, **arguments))
    variables = ", ".join(f"`{variable}`" for variable in template_variables((TEMPLATES / f"{name}.jinja").read_text()))
    form = "as text" if chat.call_form is None else "JSON" if isinstance(chat.call_form, JSONForm) else "tags"
    system = system_message(chat)
    plain = restarts(chat, "A")
    if system != "rejected" and restarts(chat, "A", system=True) != plain:
        plain += "; with a system message a new row"
    cells = (plain, restarts(chat, f"{REASONING}A"), restarts(chat, f"{REASONING}call", tools=[ADD]))
    return f"| {label} | {variables or '-'} | {system} | {form} | {' | '.join(cells)} |"


def test_the_page_has_the_table_of_all_families() -> None:
    page = PAGE.read_text()
    rows = [row(*family) for family in FAMILIES]
    assert [line for line in rows if line not in page] == []
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {name for _, name, _ in FAMILIES}


def test_an_argument_reaches_every_rendering(tmp_path: Path, model_folder: Path) -> None:
    qwen = (TEMPLATES / "qwen3.jinja").read_text()
    policy = Policy(str(model_folder), chat_template=qwen, chat_template_kwargs={"enable_thinking": False})
    messages = [{"role": "user", "content": "Q"}]
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert policy.chat.render([Message("user", "Q")], generation_prompt=True) == prompt
    assert policy.chat.describes_tools([ADD])
    assert policy.chat.call_form == JSONForm("<tool_call>")
    policy.load()
    policy.save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt
    thinking = exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert thinking == prompt.removesuffix("<think>\n\n</think>\n\n"), "the value is a default"
    again = Policy(str(tmp_path), chat_template_kwargs={"enable_thinking": True})
    assert again.chat.render([Message("user", "Q")], generation_prompt=True) == thinking


def test_arguments_of_other_types() -> None:
    text = ChatFormat(TOKENIZER, template("gpt_oss", reasoning_effort="high", model_identity='It\'s "me".\n')).render(
        [Message("user", "Q")], generation_prompt=True
    )
    assert "\n\nReasoning: high\n" in text
    assert 'It\'s "me".\n' in text


@pytest.mark.parametrize(
    "text", ["\n{{ flag }}|", "\n\n  {% if flag == 3 %}\nthree\n{% endif %}", "  {%- if flag %} x{% endif %}"]
)
def test_the_text_of_the_template_stays(text: str) -> None:
    changed = with_arguments(text, {"flag": 3}, "m")
    messages = [{"role": "user", "content": "Q"}]
    given = TOKENIZER.apply_chat_template(messages, chat_template=text, tokenize=False, flag=3)
    assert TOKENIZER.apply_chat_template(messages, chat_template=changed, tokenize=False) == given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"enable_thinkin": False},
            r"its chat template does not read; did you mean 'enable_thinking'\? It reads",
        ),
        ({"reasoning_effort": "low"}, r"has 'reasoning_effort', .* it reads \['enable_thinking'\]"),
        ({"tools": []}, "chat_template_kwargs has 'tools'"),
        ({"content": "x"}, "chat_template_kwargs has 'content'"),
    ],
)
def test_an_argument_that_the_template_does_not_read_is_refused(
    arguments: dict[str, Any], message: str, model_folder: Path
) -> None:
    qwen = (TEMPLATES / "qwen3.jinja").read_text()
    with pytest.raises(ConfigurationError, match=message):
        Policy(str(model_folder), chat_template=qwen, chat_template_kwargs=arguments)
    with pytest.raises(ConfigurationError, match="it reads none"):
        Policy(str(model_folder), chat_template_kwargs={"enable_thinking": False})


ANALYSIS, FINAL = "<|channel|>analysis<|message|>7 or 8?<|end|><|start|>assistant", "<|channel|>final<|message|>8"
CALL = ' to=functions.add <|constrain|>json<|message|>{"a": 1}'


def harmony() -> ChatFormat:
    """Return the format of gpt-oss for a tokenizer with its special tokens."""
    tokenizer = build_tokenizer()
    names = ("start", "end", "message", "channel", "constrain", "call", "return")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    return ChatFormat(tokenizer, template("gpt_oss"))


@pytest.mark.parametrize(
    ("sampled", "content", "final"),
    [
        (f"{ANALYSIS}{FINAL}<|return|>", "<think>\n7 or 8?\n</think>\n\n8", "8"),
        ("<|channel|>analysis<|message|>7 or", "<think>\n7 or\n</think>\n\n", ""),
        (f"{FINAL}<|return|>", "8", "8"),
        ("<|channel|>commentary<|message|>Adding.<|end|><|start|>assistant" + FINAL, "Adding.\n8", "Adding.\n8"),
        ("8<|return|>", "8", "8"),
        ("<|start|>assistant", "", ""),
        ("<|channel|>final", "", ""),
        ("<|channel|>analysis<|message|>x<|channel|>final<|message|>8<|return|>", "<think>\nx\n</think>\n\n8", "8"),
        ("it is at x/?to=b", "it is at x/?to=b", "it is at x/?to=b"),
        ("<|channel|>final<|message|>8<unk><|message|>9", "89", "89"),
        ("<|channel|>final<|message|>8<|end|><|start|>functions.add to=assistant<|message|>3", "8", "8"),
    ],
)
def test_a_reply_in_channels_has_its_reasoning_in_think(sampled: str, content: str, final: str) -> None:
    chat = harmony()
    message = chat.heard(chat.encode(sampled), ())
    assert (message.content, message.final_text) == (content, final)


def test_the_next_prompt_has_a_reply_in_its_channel() -> None:
    chat = harmony()
    conversation = Conversation(chat)
    conversation.observe([Message("user", "Q")])
    ids = chat.encode(f"{ANALYSIS}{FINAL}<|return|>")
    conversation.act(ids, [-1.0] * len(ids))
    conversation.observe([Message("user", "R")])
    text = chat.tokenizer.decode(conversation.row.token_ids)
    assert text.endswith(
        "<|start|>assistant<|channel|>final<|message|>8<|end|><|start|>user<|message|>R<|end|><|start|>assistant"
    )
    assert "7 or 8?" not in text


@pytest.mark.parametrize("header", ["<|channel|>commentary" + CALL, CALL.replace(" <", "<|channel|>commentary <", 1)])
def test_a_call_in_a_channel_is_read_and_shown_as_the_template_writes_it(header: str) -> None:
    chat = harmony()
    conversation = Conversation(chat, [ADD])
    conversation.observe([Message("user", "Q")])
    ids = chat.encode(f"{ANALYSIS}{header}<|call|>")
    message = conversation.act(ids, [-1.0] * len(ids))
    assert message.tool_calls == (ToolCall("call00000", "add", {"a": 1}),)
    conversation.observe([tool_message(message.tool_calls[0], "3")])
    assert chat.tokenizer.decode(conversation.row.token_ids).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>7 or 8?<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    )


def test_a_call_with_a_tag_in_its_arguments_has_no_analysis() -> None:
    call = Message("assistant", "", (ToolCall("c", "add", {"a": "x.split('</think>')"}),))
    text = harmony().render([Message("user", "Q"), with_written_calls(call)], [ADD], generation_prompt=True)
    assert text.count("analysis") == 1, "that of the system message"


def test_the_results_of_several_calls_are_all_shown() -> None:
    chat = harmony()
    sampled = f"<|channel|>commentary{CALL}<|end|><|start|>assistant<|channel|>commentary{CALL}"
    reply = chat.heard(chat.encode(sampled), [ADD])
    assert len(reply.tool_calls) == 2
    results = [tool_message(call, f"result {number}") for number, call in enumerate(reply.tool_calls)]
    text = chat.render([Message("user", "Q"), reply, *results], [ADD], generation_prompt=True)
    assert text.count('"a": 1') == 2
    assert "<|start|>user<|message|><tool_response>\nresult 0\n</tool_response>\n<tool_response>\nresult 1" in text


def test_a_reply_without_reasoning_has_no_analysis_and_a_call_ends_a_turn() -> None:
    chat = harmony()
    text = chat.render([Message("user", "Q"), Message("assistant", "8")], generation_prompt=False)
    assert text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>8<|return|>")
    ended = [chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>", "<|call|>")]
    assert {*ended} <= {*chat.stop_ids}


def test_a_malformed_call_in_a_channel_is_known_as_one() -> None:
    chat = harmony()
    message = chat.heard(chat.encode("<|channel|>commentary to=functions.add json<|message|>{oops<|call|>"), [ADD])
    assert message.tool_calls == ()
    assert requested_calls(message) == (MalformedCall("it is not JSON"),)


@pytest.mark.parametrize(
    ("content", "calls", "written"),
    [
        ("<think>\n7 or 8?\n</think>\n\n8", (), ANALYSIS + FINAL),
        ("8", (), FINAL),
        ("<think>7 or", (), "<|channel|>final<|message|><think>7 or"),  # no answer to tell apart
        (
            "<think>7 or 8?</think>",
            (ToolCall("c", "add", {"a": 1}),),
            f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}<|call|>',
        ),
    ],
)
def test_the_reasoning_in_the_content_of_a_demonstration_is_written_in_analysis(
    content: str, calls: tuple[ToolCall, ...], written: str
) -> None:
    chat = harmony()
    conversation = GivenConversation(chat, [ADD] if calls else [])
    conversation.observe([Message("user", "Q")])
    conversation.demonstrate(GivenReply("assistant", content, calls) if calls else Message("assistant", content))
    text = chat.tokenizer.decode(conversation.row.token_ids)
    assert text.partition("Q<|end|><|start|>assistant")[2].removesuffix("<|return|>") == written
