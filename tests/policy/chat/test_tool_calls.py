"""Tool calls in the forms of chat templates: short templates after those of the model families that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mrlm_pl.environment.tools import MAX_LEVELS, MalformedCall, requested_calls, written_call
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.policy.chat import PLAIN_TEMPLATE, ChatFormat, Conversation
from mrlm_pl.policy.chat.replies import GivenConversation
from mrlm_pl.policy.chat.tool_calls import CallForm, JSONForm, TaggedForm
from mrlm_pl.policy.tiny import build_tokenizer
from tests.support.runs.logs import logged_here

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
HEAD = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
SAID = "<|{{ m.role }}|>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"


def template(call: str, opening: str = "", closing: str = "") -> str:
    """Return a template that writes each call as ``call`` says, with ``f`` for the function, between two texts."""
    calls = "{% if m.tool_calls %}" + opening + CALLS + call + "{% endfor %}" + closing + "{% endif %}"
    return HEAD + SAID + calls + "<|end|>" + TAIL


OBJECT = '{"name": "{{ f.name }}", "%s": {{ f.arguments | tojson }}}'
HERMES = template("\n<tool_call>\n" + OBJECT % "arguments" + "\n</tool_call>")
LLAMA = template(OBJECT % "parameters")
LISTED = template(OBJECT % "arguments", "[CALLS][", "]")
OUTSIDE = template("[CALL]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
THINKING = template("<think>\n\n</think>\n\n<tool_call>\n" + OBJECT % "arguments" + "\n</tool_call>")
ITEMS = "{% for k, v in f.arguments.items() %}"
QWEN_CODER = template(
    "<tool_call>\n<function={{ f.name }}>\n"
    + ITEMS
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM = template(
    "\n<tool_call>{{ f.name }}\n"
    + ITEMS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
)
GLM_ITEM = "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"
NO_TOOLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>" + TAIL
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>" + TAIL
)


def conversation(chat_template: str) -> Conversation:
    return Conversation(ChatFormat(build_tokenizer(), chat_template), [ADD])


def say(talk: Conversation, text: str) -> Message:
    ids = [*talk.chat.encode(text), talk.chat.end_id]
    return talk.act(ids, [-1.0] * len(ids))


@pytest.mark.parametrize(
    ("chat_template", "form"),
    [
        (HERMES, JSONForm("<tool_call>")),
        (THINKING, JSONForm("<tool_call>")),
        (LLAMA, JSONForm("")),
        (LISTED, JSONForm("[CALLS]")),
        (OUTSIDE, JSONForm("[CALL]", "[ARGS]")),
        (QWEN_CODER, TaggedForm("<function=", ">", "<parameter=", ">", "</parameter>")),
        (GLM, TaggedForm("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")),
        (NO_TOOLS, None),
        (ALTERNATING, None),
    ],
)
def test_the_form_is_found_by_letting_the_template_write_a_call(chat_template: str, form: CallForm | None) -> None:
    assert ChatFormat(build_tokenizer(), chat_template).call_form == form


@pytest.mark.parametrize(
    ("chat_template", "sampled"),
    [
        (HERMES, 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x"}}\n</tool_call>'),
        (HERMES, '<tool_call>{"arguments":{"note":"x","a":1},"name":"add"}</tool_call>'),
        (LLAMA, '{"name": "add", "parameters": {"a": 1, "note": "x"}}'),
        (LISTED, '[CALLS] [{"name": "add", "arguments": {"a": 1, "note": "x"}}]'),
        (OUTSIDE, '[CALL]add[ARGS]{"a": 1, "note": "x"}'),
        (QWEN_CODER, "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n</function>"),
        (GLM, f"<tool_call>add\n{GLM_ITEM % ('a', '1')}{GLM_ITEM % ('note', 'x')}</tool_call>"),
    ],
)
def test_a_call_in_the_templates_form_reaches_the_environment_typed(chat_template: str, sampled: str) -> None:
    talk = conversation(chat_template)
    talk.observe([Message("user", "1+1?")])
    message = say(talk, sampled)
    assert message.tool_calls == (ToolCall("call00000", "add", {"a": 1, "note": "x"}),)
    assert requested_calls(message) == message.tool_calls
    assert message.content == sampled, "the text is kept as it was sampled"


def test_several_calls_are_numbered() -> None:
    talk = conversation(HERMES)
    talk.observe([Message("user", "?")])
    call = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
    calls = say(talk, call % 1 + "\n" + call % 2).tool_calls
    assert [(made.id, made.arguments["a"]) for made in calls] == [("call00000", 1), ("call00001", 2)]


@pytest.mark.parametrize("chat_template", [HERMES, GLM, NO_TOOLS])
def test_of_more_than_eight_calls_the_ninth_is_answered_as_malformed(chat_template: str) -> None:
    talk = conversation(chat_template)
    talk.observe([Message("user", "?")])
    call = f"<tool_call>add\n{GLM_ITEM % ('a', '1')}</tool_call>" if chat_template == GLM else written_call("add", a=1)
    *read, ninth = requested_calls(say(talk, call * 10))
    assert [getattr(made, "name", None) for made in read] == ["add"] * 8
    assert ninth == MalformedCall("a reply may ask for 8 calls at most")


@pytest.mark.parametrize(("said", "count"), [("Maybe ", 0), ("Yes.</think>", 1)])
def test_a_call_in_reasoning_that_the_prompt_opens_is_not_read(said: str, count: int) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    opening = HERMES.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
    talk = Conversation(ChatFormat(tokenizer, opening), [ADD])
    talk.observe([Message("user", "?")])
    assert len(say(talk, said + written_call("add", a=1)).tool_calls) == count


def test_a_malformed_call_is_left_to_the_environment() -> None:
    talk = conversation(HERMES)
    talk.observe([Message("user", "?")])
    message = say(talk, "<tool_call>{oops</tool_call>")
    assert message.tool_calls == ()
    (malformed,) = requested_calls(message)
    assert getattr(malformed, "fault", None) == "it is not JSON"


def test_a_call_in_the_reasoning_is_not_read() -> None:
    first, second = (f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>' for number in (1, 2))
    calls = [JSONForm("<tool_call>").read(f"{first}</think>{said}", [ADD]) for said in (second, "Nothing to add.")]
    assert [[call.arguments for call in read] for read in calls] == [[{"a": 2}], []]


def test_arguments_that_are_too_deep_for_records_are_malformed() -> None:
    for levels, read in ((MAX_LEVELS - 1, True), (MAX_LEVELS, False), (600, False)):
        text = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * levels + "]" * levels + "}}</tool_call>"
        (call,) = requested_calls(Message("assistant", text))
        assert isinstance(call, ToolCall) is read
        assert len(JSONForm("<tool_call>").read(text, [])) == read
        assert read or getattr(call, "fault", None) == 'its "arguments" are nested more than 100 levels deep'


OPTIONAL = [{"type": "integer"}, {"type": "null"}]
WORDS = {"enum": ["red", "3"], "type": "string"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (True, "1", 1),
        ({}, '{"x": 1}', {"x": 1}),
        ({}, "red", "red"),
        (None, "1", "1"),
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, '"1"', '"1"'),
        ({"type": "string", "minLength": 3}, "1", "1"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "1", 1),
        ({"type": "integer", "maximum": 0}, "1", 1),
        ({"anyOf": OPTIONAL}, "1", 1),
        ({"anyOf": OPTIONAL}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1", "1"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Point"}, '{"x": "y"}', {"x": "y"}),
        ({"$ref": "#/$defs/Words"}, "3", "3"),
        ({"type": "array", "items": None}, "[1]", [1]),
    ],
)
def test_the_schema_says_whether_a_tagged_argument_is_text_or_json(schema: Any, text: str, value: Any) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    parameters = {"properties": {"a": schema, "b": None}, "required": ["b"], "$defs": {"Point": point, "Words": WORDS}}
    tool = {"function": {"name": "add", "parameters": parameters}}
    form = TaggedForm("<function=", ">", "<parameter=", ">", "</parameter>")
    (call,) = form.read(f"<function=add><parameter=a>{text}</parameter></function>", [tool])
    assert call.arguments == {"a": value}


@pytest.mark.parametrize("chat_template", [HERMES, LLAMA, QWEN_CODER, NO_TOOLS, ALTERNATING])
def test_the_answer_of_a_tool_is_appended_to_what_was_sampled(chat_template: str) -> None:
    talk = conversation(chat_template)
    talk.observe([Message("user", "1+1?")])
    before = list(talk.row.token_ids)
    sampled = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    say(talk, sampled)
    talk.observe([Message("tool", "the answer", tool_call_id="call00000", name="add")])
    say(talk, "It is 2.")
    talk.observe([Message("user", "Sure?")])
    text = talk.chat.tokenizer.decode(talk.row.token_ids[len(before) :])
    assert len(talk.rows) == 1
    assert talk.row.token_ids[: len(before)] == before
    place = "user" if chat_template == ALTERNATING else "tool"
    answer = "the answer" if place == "tool" else "<tool_response>\nthe answer\n</tool_response>"
    assert text == (
        f"{sampled}<|end|><|{place}|>{answer}<|end|><|assistant|>It is 2.<|end|><|user|>Sure?<|end|><|assistant|>"
    )


def test_a_model_without_a_form_is_told_of_the_tools_in_its_first_message() -> None:
    talk = conversation(NO_TOOLS)
    talk.observe([Message("system", "Be brief."), Message("user", "1+1?")])
    text = talk.chat.tokenizer.decode(talk.row.token_ids)
    assert '"name": "add"' in text
    assert "<tool_call>" in text
    assert text.endswith("Be brief.<|end|><|user|>1+1?<|end|><|assistant|>")
    told = conversation(HERMES)
    told.observe([Message("system", "Be brief."), Message("user", "1+1?")])
    assert told.row.messages[0].content == "Be brief.", "the template tells of the tools"


@pytest.mark.parametrize("text", ["", "<tool_call>", "<function=", "<function=a><parameter=b>", "[" * 5000, "{" * 5000])
@pytest.mark.parametrize(
    "form", [JSONForm(""), JSONForm("<tool_call>"), TaggedForm("<function=", ">", "<parameter=", ">", "</parameter>")]
)
def test_broken_calls_are_no_calls(form: Any, text: str) -> None:
    assert form.read(text, [ADD]) == ()


def test_a_sampled_call_of_another_model_is_demonstrated_as_its_text_alone() -> None:
    talk = GivenConversation(ChatFormat(build_tokenizer(), HERMES), [ADD])
    talk.observe([Message("user", "1+1?")])
    sampled = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    talk.demonstrate(Message("assistant", sampled, (ToolCall("c", "add", {"a": 1}),)))
    assert talk.chat.tokenizer.decode(talk.row.token_ids).endswith(f"<|assistant|>{sampled}<|end|>")


def test_results_of_one_reply_are_one_message_where_users_and_assistants_alternate() -> None:
    talk = conversation(ALTERNATING)
    talk.observe([Message("user", "1+1? 2+2?")])
    say(talk, 2 * '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    talk.observe([Message("tool", "2"), Message("tool", "4")])
    (row,) = talk.rows
    results = "".join(f"<tool_response>\n{number}\n</tool_response>\n" for number in (2, 4)).strip()
    assert talk.chat.tokenizer.decode(row.token_ids).endswith(f"<|end|><|user|>{results}<|end|><|assistant|>")


def test_a_value_that_is_not_of_its_type_stays_text() -> None:
    form = TaggedForm("<function=", ">", "<parameter=", ">", "</parameter>")
    call = "<function=add><parameter=a>one</parameter><parameter=note>1</parameter>"
    assert form.read(call, [ADD])[0].arguments == {"a": "one", "note": "1"}


@pytest.mark.parametrize(
    "parameters", [{}, *({"parameters": given} for given in (None, {"properties": None}, {"properties": {"a": None}}))]
)
def test_values_of_a_tool_without_types_are_text(parameters: dict[str, Any]) -> None:
    """As OpenAI allows it, and as parquet fills in absent fields."""
    form = TaggedForm("<function=", ">", "<parameter=", ">", "</parameter>")
    tool = {"type": "function", "function": {"name": "add", **parameters}}
    assert form.read("<function=add><parameter=a>1</parameter>", [tool])[0].arguments == {"a": "1"}


class CountingTokenizer:
    """A tokenizer that counts how often it renders and decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.rendered, self.decoded = tokenizer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.rendered += 1
        return self.tokenizer.apply_chat_template(*arguments, **options)

    def decode(self, *arguments: Any, **options: Any) -> Any:
        self.decoded += 1
        return self.tokenizer.decode(*arguments, **options)


def test_each_set_of_tools_is_looked_for_in_the_template_once() -> None:
    tokenizer = CountingTokenizer(build_tokenizer())
    chat = ChatFormat(tokenizer, HERMES)
    Conversation(chat, [ADD]).observe([Message("user", "?")])
    before = tokenizer.rendered
    for _ in range(3):
        Conversation(chat, [dict(ADD)]).observe([Message("user", "?")])
    assert tokenizer.rendered == before + 3, "the prompts"
    hidden = HERMES.replace("tools | tojson", "tools[0] | tojson")  # such a template tells of the first tool only
    chat = ChatFormat(build_tokenizer(), hidden)
    other = {**ADD, "function": {**ADD["function"], "name": "multiply"}}
    assert [chat.describes_tools(tools) for tools in ([ADD], [ADD, other], [other], [ADD])] == [True, False, True, True]


def test_a_turn_is_decoded_once() -> None:
    tokenizer = CountingTokenizer(build_tokenizer())
    talk = Conversation(ChatFormat(tokenizer, HERMES), [ADD])
    talk.observe([Message("user", "1+1?")])
    before = tokenizer.decoded
    assert say(talk, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    assert tokenizer.decoded == before + 1


def test_calls_that_are_marked_by_special_tokens_are_read_and_the_marks_are_no_text() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[CALLS]"]})
    talk = Conversation(ChatFormat(tokenizer, LISTED), [ADD])
    talk.observe([Message("user", "1+1?")])
    calls = '[{"name": "add", "arguments": {"a": 1}}]'
    message = say(talk, f"[CALLS]{calls}")
    assert message == Message("assistant", calls, (ToolCall("call00000", "add", {"a": 1}),))
    ids = talk.chat.encode("no end")
    assert talk.act(ids, [-1.0] * len(ids)).content == "no end"


def test_a_template_that_names_the_tools_but_writes_no_calls_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    chat = ChatFormat(build_tokenizer(), HEAD + SAID + "<|end|>" + TAIL)
    assert not any(chat.describes_tools([ADD]) for _ in range(2))
    assert [record.getMessage().partition(",")[0].split(" of ")[0] for record in logged_here(caplog)] == [
        "the chat template"
    ]
    caplog.clear()
    assert not ChatFormat(build_tokenizer(), PLAIN_TEMPLATE).describes_tools([ADD])
    assert not logged_here(caplog), "this one says nothing of tools"


def test_a_recipe_tells_of_tools_in_its_own_template() -> None:
    settings = yaml.safe_load((Path(__file__).parents[3] / "configs/recipes/tiny_tools.yaml").read_text())
    template = settings["model"]["init_args"]["policies"]["main"]["chat_template"]
    chat = ChatFormat(build_tokenizer(), template)
    assert chat.describes_tools([ADD])
    assert chat.call_form == JSONForm("<tool_call>")
    shown = chat.render([Message("user", "1+1?"), Message("tool", "2")], [ADD], generation_prompt=True)
    assert shown == "<|system|>add <|end|><|user|>1+1?<|end|><|tool|>2<|end|><|assistant|>"


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_call_with_a_number_that_records_lack_is_malformed(number: str) -> None:
    chat = ChatFormat(build_tokenizer(), HERMES)
    text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    message = chat.heard(chat.encode(text), [ADD])
    assert message == Message("assistant", text)
    (malformed,) = requested_calls(message)
    assert getattr(malformed, "fault", "").endswith("NaN or infinite")
