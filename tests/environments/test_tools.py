from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mrlm_environments.toolbox.calculator import Calculator
from mrlm_environments.toolbox.files import FileSystem
from mrlm_environments.toolbox.functions import FunctionTool
from mrlm_environments.toolbox.search import WebSearch
from mrlm_environments.toolbox.toolbox import BUILT_IN
from mrlm_environments.tools.environment import NUDGE, ToolEnvironment, same_answer
from mrlm_environments.tools.problems import KINDS, REQUIRED_TOOLS

from mrlm_pl.cli.main import main
from mrlm_pl.environment import Step, Task, ToolSchema
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tools import Tool, ToolError, ToolSet, answer_calls
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError, DataError

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17*23+4"}}</tool_call>'
ANSWER = "<answer>395</answer>"


def a_task(**data: Any) -> Task:
    common = {"question": "17*23+4=?", "answer": "395", "required_tools": ["calculator"], "gold": None}
    return Task("tools", "train", 0, 0, {**common, **data})


def play(replies: Sequence[str | Message], task: Task | None = None, **options: Any) -> list[Step]:
    """Return the steps of an episode; the last reply is given again until it is done."""
    environment = ToolEnvironment(**options)
    environment.reset(task or a_task())
    steps: list[Step] = []
    while not steps or not steps[-1].done:
        reply = replies[min(len(steps), len(replies) - 1)]
        message = reply if isinstance(reply, Message) else Message("assistant", reply)
        steps.append(environment.step({"agent": message}))
    environment.close()
    return steps


def earned(steps: Sequence[Step]) -> float:
    return sum(step.rewards["agent"] for step in steps)


def told(reply: str | Message, **options: Any) -> str:
    """Return the agent's observation after its first reply."""
    (message, *_) = play([reply, ANSWER], **options)[0].observations["agent"]
    return message.content


def test_a_call_is_answered_and_the_answer_ends() -> None:
    environment = ToolEnvironment(tools=["calculator"])
    observed = environment.reset(a_task())
    assert observed["agent"] == (Message("user", "17*23+4=?"),)
    step = environment.step({"agent": Message("assistant", CALL)})
    assert step.observations["agent"] == (Message("tool", "395", tool_call_id="call00000", name="calculator"),)
    step = environment.step({"agent": Message("assistant", ANSWER)})
    assert (step.done, step.success, step.stop_reason) == (True, True, "answered")
    assert step.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_the_final_reward() -> None:
    # 0.5 correct, 0.3 for the one required tool, 0.2 (1 - 1/8) for one turn before the answer of eight
    steps = play([CALL, ANSWER], max_turns=8)
    assert earned(steps) == pytest.approx(0.975)
    assert steps[-1].components["agent"] == pytest.approx(
        {"correct": 0.5, "tools": 0.3, "speed": 0.175, "shaping": -0.1}
    )
    assert steps[0].components["agent"] == pytest.approx({"shaping": 0.1})
    assert earned(play([ANSWER], max_turns=8)) == pytest.approx(0.7)
    assert earned(play([CALL, CALL, CALL, ANSWER], max_turns=4)) == pytest.approx(0.5 + 0.3 + 0.05)
    assert earned(play([CALL, "<answer>394</answer>"])) == pytest.approx(0.3)
    assert earned(play(["<answer>394</answer>"])) == 0.0
    assert earned(play([CALL], max_turns=3)) == pytest.approx(0.3)
    assert earned(play(["hm"], max_turns=3)) == 0.0


def test_the_share_counts_each_required_tool_once_and_only_with_success() -> None:
    task = a_task(required_tools=["calculator", "web_search", "file_system"])
    failed = '<tool_call>{"name": "file_system", "arguments": {"operation": "read", "path": "x"}}</tool_call>'
    steps = play([CALL + CALL + failed, "<answer>1</answer>"], task)
    assert earned(steps) == pytest.approx(0.1)
    assert [message.content for message in steps[0].observations["agent"]] == [
        "395",
        "395",
        "error: 'x' does not exist",
    ]
    search = '<tool_call>{"name": "web_search", "arguments": {"query": "gold"}}</tool_call>'
    assert earned(play([CALL, search, ANSWER], task, max_turns=4)) == pytest.approx(0.5 + 0.2 + 0.1)


def test_without_required_tools_a_right_answer_earns_one_and_a_wrong_one_nothing() -> None:
    task = a_task(required_tools=[])
    assert earned(play([ANSWER], task)) == pytest.approx(1.0)
    assert earned(play([CALL, "<answer>1</answer>"], task)) == 0.0


def test_calls_of_an_answering_reply_are_not_made() -> None:
    steps = play([CALL + ANSWER])
    assert earned(steps) == pytest.approx(0.7)
    assert steps[-1].metrics["tool_calls"] == 0.0


def test_an_answer_inside_of_a_call_is_none() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "<answer>395</answer>"}}</tool_call>'
    assert "not allowed" in told(call)


def test_native_calls_are_made() -> None:
    message = Message("assistant", "", tool_calls=(ToolCall("x1", "calculator", {"expression": "2^5"}),))
    (answer,) = play([message, ANSWER])[0].observations["agent"]
    assert answer == Message("tool", "32", tool_call_id="x1", name="calculator")


def a_call(arguments: str, name: str = "calculator") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("What?", NUDGE),
        ("<tool_call>{oops</tool_call>", "malformed call: it is not JSON"),
        (a_call("{}", "hack"), "no tool 'hack'; the tools are calculator"),
        (a_call("{}"), "'expression' is a required property"),
        (a_call('{"expression": 5}'), "not of type 'string'"),
        (a_call('{"expression": "9**9**9"}'), "too large"),
        (a_call('{"expression": "1/0"}'), "error: division by zero"),
        (a_call("{}", "\\ud800"), "no tool '\\ud800'"),
        ("<tool_call>" * 5000, "malformed"),
    ],
    ids=range(9),
)
def test_a_faulty_call_is_an_observation(reply: str, reason: str) -> None:
    text = told(reply, tools=["calculator"])
    assert reason in text
    assert len(text) < 1000
    assert "395" not in text


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_arguments_of_any_depth_are_an_observation(opening: str, closing: str) -> None:
    environment = ToolEnvironment(tools=["calculator"], max_turns=1000)
    environment.reset(a_task())
    for deep in range(800, 1000):  # around the interpreter's limit, where reading works and showing does not
        reply = a_call('{"expression": ' + opening * deep + "1" + closing * deep + "}")
        step = environment.step({"agent": Message("assistant", reply)})
        assert "error" in step.observations["agent"][0].content


def test_long_answers_are_cut() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2^1000"}}</tool_call>'
    assert told(call, max_output=10) == "1071508607\n[292 more characters]"


SPAM_REPLIES = st.sampled_from(
    [
        CALL,
        CALL * 5,
        "",
        "hm",
        "<tool_call>{",
        '<tool_call>{"name": "web_search", "arguments": {"query": "a"}}</tool_call>',
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SPAM_REPLIES, min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.integers(0, 3),
)
def test_no_loop_of_calls_pays_more_than_solving(
    spam: list[str], max_turns: int, shaping: float, required: int
) -> None:
    task = a_task(required_tools=["calculator", "web_search", "file_system"][:required])
    steps = play(spam, task, max_turns=max_turns, shaping=shaping)
    assert len(steps) == max_turns
    assert (steps[-1].stop_reason, steps[-1].truncated, steps[-1].success) == ("max_turns", True, False)
    assert sum(step.components["agent"]["shaping"] for step in steps) == pytest.approx(0)
    for wasted in range(max_turns):
        solved = play([*(spam * max_turns)[:wasted], ANSWER], task, max_turns=max_turns, shaping=shaping)
        assert earned(steps) < earned(solved) <= 1 + 1e-9
    # An episode that something else cuts short has not paid the shaping back: even then it is below solving.
    assert sum(step.rewards["agent"] for step in steps[:-1]) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_generated_problems_are_solved_by_their_tools(kind: Any) -> None:
    environment = ToolEnvironment(kinds=[kind])
    for index in range(30):
        task = environment.tasks("train")[index]
        assert tuple(task.data["required_tools"]) == REQUIRED_TOOLS[kind]
        gold = environment.gold(task)
        assert gold is not None
        steps = play(gold["agent"], task)
        assert steps[-1].metrics["tool_errors"] == 0
        assert earned(steps) == pytest.approx(0.975)
        answers = [message.content for message in steps[0].observations["agent"]]
        if kind == "files":
            assert sum(map(int, answers[0].split())) == int(task.data["answer"])
            assert earned(play([gold["agent"][1]], task)) == 0, "the file was not written"
        else:
            assert answers[-1] == task.data["answer"]
        if kind == "lookup":
            first, second = (
                int(number)
                for number in gold["agent"][0]
                .split('"expression": "')[1]
                .split('"')[0]
                .replace("*", " ")
                .replace("+", " ")
                .replace("-", " ")
                .split()
            )
            assert str(first) in answers[0]
            assert str(second) in answers[1]


def test_generated_splits_are_disjoint_and_reproducible() -> None:
    environment = ToolEnvironment()
    asked = {split: {environment.tasks(split)[n].data["question"] for n in range(300)} for split in ("train", "test")}
    assert not asked["train"] & asked["test"]
    assert environment.tasks("test")[5] == ToolEnvironment().tasks("test")[5]
    assert {environment.tasks("train")[n].data["kind"] for n in range(50)} == set(KINDS)


def test_a_written_file_is_part_of_the_answer() -> None:
    task = ToolEnvironment(kinds=["files"]).tasks("train")[0]
    wrong = a_call('{"operation": "write", "path": "sum.txt", "content": "1"}', "file_system")
    steps = play([wrong, f"<answer>{task.data['answer']}</answer>"], task)
    assert steps[-1].success is False
    assert earned(steps) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("395", True),
        ("The result is 395.", True),
        ("395 km", True),
        ("x = 395", True),
        (r"\boxed{395}", True),
        ("**395**", True),
        ("Total: $395", True),
        ("17*23+4 = 395", True),
        ("17*23+4", False),
        ("395 or 396", False),
        ("17, 395", False),
        ("not 395", False),
        ("The result is 396.", False),
    ],
)
def test_a_number_is_read_from_the_words_around_it(answer: str, right: bool) -> None:
    environment = ToolEnvironment()
    environment.reset(Task("tools", "train", 0, 0, {"question": "17*23+4=?", "answer": "395"}))
    assert environment.step({"agent": Message("assistant", f"<answer>{answer}</answer>")}).success is right


@pytest.mark.parametrize(
    ("question", "expected", "answer", "right"),
    [
        ("25-20=?", "5", "25-20", False),
        ("25-20=?", "5", "The answer is 25-20", False),
        ("25-20=?", "5", r"\boxed{25-20}", False),
        ("25-20=?", "5", "24-19", False),
        ("25-20=?", "5", "5 minus 0", False),
        ("185/5=?", "37", "185/5", False),
        ("185/5=?", "37", "185/5 = 37", True),
        ("25-20=?", "5", "The answer is 25-20 = 5", True),
        ("185 apples for 5 children, how many each?", "37", "185/5", False),
        ("185 apples for 5 children, how many each?", "37", r"\frac{185}{5}", False),
        ("185 apples for 5 children, how many each?", "37", "185/5 = 37 apples", True),
        ("How much of it?", "0.5", "1/2", True),
        ("20-25=?", "-5", "minus 5", True),
        ("20-25=?", "-5", "It is minus 5.", True),
        ("25-20=?", "5", "five", True),
    ],
)
def test_an_operation_is_no_answer_and_a_number_in_words_is(
    question: str, expected: str, answer: str, right: bool
) -> None:
    environment = ToolEnvironment()
    environment.reset(Task("tools", "train", 0, 0, {"question": question, "answer": expected}))
    assert environment.step({"agent": Message("assistant", f"<answer>{answer}</answer>")}).success is right


@pytest.mark.parametrize(
    ("reply", "expected", "same"),
    [
        ("395.0", "395", True),
        ("395.", "395", True),
        ("$1,234", "1234", True),
        ("1/2", "0.5", True),
        ("396", "395", False),
        ("395 or 396", "395", False),
        ("", "395", False),
        (" paris. ", "Paris", True),
        ("Paris, France", "Paris", False),
        ("ＰＡＲＩＳ", "Paris", True),
    ],
)
def test_answers_are_compared_by_value_or_as_text(reply: str, expected: str, same: bool) -> None:
    assert same_answer(reply, expected) is same


def rows_file(path: Path, rows: list[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_of_tasks(tmp_path: Path) -> None:
    rows = [
        {
            "question": "What is in a.txt?",
            "answer": "Blue",
            "required_tools": ["file_system"],
            "files": {"a.txt": "Blue"},
        },
        {"question": "1+1?", "answer": 2},
    ]
    data = rows_file(tmp_path / "d.jsonl", rows)
    environment = ToolEnvironment(data={"train": data})
    first, second = environment.tasks("train")
    read = '<tool_call>{"name": "file_system", "arguments": {"operation": "read", "path": "a.txt"}}</tool_call>'
    steps = play([read, "<answer>blue</answer>"], first)
    assert steps[0].observations["agent"][0].content == "Blue"
    assert earned(steps) == pytest.approx(0.975)
    assert environment.gold(first) is None
    assert environment.gold(second) == {"agent": ["<answer>2</answer>"]}
    assert earned(play(["<answer>2</answer>"], second)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("question", 3),
        ("answer", None),
        ("answer", ""),
        ("answer", True),
        ("required_tools", "calculator"),
        ("required_tools", ["hammer"]),
        ("files", ["a"]),
        ("files", {"a": 1}),
    ],
)
def test_faults_of_a_file_are_named(tmp_path: Path, field: str, value: Any) -> None:
    rows = [{"question": "R?", "answer": "1", field: value}]
    data = rows_file(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match=rf"d\.jsonl.*row 1.*{field}"):
        ToolEnvironment(data={"train": data}).tasks("train")


class Echo(Tool):
    schema = ToolSchema("echo", "Says it again.", {"type": "object", "properties": {"text": {"type": "string"}}})

    def call(self, arguments: Mapping[str, Any]) -> str:
        if "text" not in arguments:
            raise ToolError("no text")
        return arguments["text"]


class Pair(ToolSet):
    """Two tools with one life, which it notes."""

    def __init__(self) -> None:
        self.life: list[str] = []

    def tools(self) -> Sequence[Tool]:
        second = Echo()
        second.schema = ToolSchema("second", "")
        return [Echo(), second]

    def open(self, task: Task) -> None:
        self.life.append("open")

    def finish(self) -> None:
        self.life.append("finish")

    def close(self) -> None:
        self.life.append("close")


def test_tools_of_ones_own_and_sets_of_them() -> None:
    pair = Pair()
    environment = ToolEnvironment(tools=["calculator", pair])
    assert [schema.name for schema in environment.tools("agent")] == ["calculator", "echo", "second"]
    environment.reset(a_task(required_tools=["echo"]))
    step = environment.step(
        {"agent": Message("assistant", '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>')}
    )
    assert step.observations["agent"][0].content == "hi"
    assert environment.step({"agent": Message("assistant", ANSWER)}).rewards["agent"] == pytest.approx(0.975 - 0.1)
    environment.close()
    assert pair.life == ["finish", "open", "finish", "close"]


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def undescribed(a: int) -> int:
    """Return it."""
    return a


def yielding(a: int) -> Iterator[int]:
    """Yield it.

    Args:
        a: It.
    """
    yield a


def undefined(a: Absent) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Return it.

    Args:
        a: It.
    """
    return int(a)


def nameless(a: int, /) -> int:
    """Return it.

    Args:
        a: It.
    """
    return a


def any_number(*numbers: int) -> int:
    """Add them.

    Args:
        numbers: They.
    """
    return sum(numbers)


def reversed_or_exits(words: list[str], sign: str | None = "-") -> str:
    """Join words from the last to the first; exit without a sign.

    Args:
        words: The words.
        sign: Between them.
    """
    words.reverse()
    return sys.exit("no sign") if sign is None else sign.join(words)


async def waiting(a: int) -> int:
    """Return it.

    Args:
        a: It.
    """
    return a


def test_a_function_is_a_tool() -> None:
    environment = ToolEnvironment(tools=[add], data="x.jsonl")
    (schema,) = environment.tools("agent")
    number = {"type": "integer"}
    assert (schema.name, schema.description) == ("add", "Add two numbers.")
    assert schema.parameters == {
        "type": "object",
        "properties": {"a": {**number, "description": "The first."}, "b": {**number, "description": "The second."}},
        "required": ["a"],
        "additionalProperties": False,
    }
    environment.reset(a_task(required_tools=["add"]))
    calls = "".join(
        f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        for arguments in ('{"a": 40}', '{"a": 1, "b": 2}', '{"a": 1, "c": 2}', '{"b": 1}')
    )
    answers = environment.step({"agent": Message("assistant", calls)}).observations["agent"]
    assert [answer.content for answer in answers[:2]] == ["42", "3"]
    assert all(answer.content.startswith("error: wrong arguments of add") for answer in answers[2:])


def test_a_function_keeps_neither_null_nor_its_exit_nor_its_changes_from_the_record() -> None:
    tool = FunctionTool(reversed_or_exits)
    calls = [
        ToolCall(str(number), tool.schema.name, {"words": ["a", "b"], "sign": sign})
        for number, sign in enumerate(("+", None))
    ]
    made = answer_calls(calls, [tool.schema], "", lambda call: tool.call(call.arguments))
    assert [(message.content, succeeded) for message, succeeded in made] == [
        ("b+a", True),
        ("Error: SystemExit: no sign", False),
    ]
    assert [call.arguments["words"] for call in calls] == [["a", "b"], ["a", "b"]]


def test_a_method_is_a_tool_of_its_object_and_no_tool_of_an_environment_that_does_not_reset_it() -> None:
    class Counter:
        count = 0

        def increment(self, step: int) -> int:
            """Increment.

            Args:
                step: By how much.
            """
            self.count += step
            return self.count

    counter = Counter()
    tool = FunctionTool(counter.increment)
    assert list(tool.schema.parameters["properties"]) == ["step"]
    assert [tool.call({"step": 2}), tool.call({"step": 3}), counter.count] == ["2", "5", 5]
    with pytest.raises(ConfigurationError, match="is not a tool or function"):
        ToolEnvironment(tools=[counter.increment], data="x.jsonl")


def test_an_exception_of_a_function_is_an_answer_that_the_agent_reads() -> None:
    def divide(a: int) -> float:
        """Divide one.

        Args:
            a: The divisor.
        """
        return 1 / a

    environment = ToolEnvironment(tools=[divide], data="x.jsonl")
    environment.reset(a_task())
    call = Message("assistant", '<tool_call>{"name": "divide", "arguments": {"a": 0}}</tool_call>')
    step = environment.step({"agent": call})
    assert "ZeroDivisionError: division by zero" in str(step.observations["agent"])
    assert not step.done


def test_a_configuration_names_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(f"{inspect.getsource(add)}")
    rows = rows_file(tmp_path / "rows.jsonl", [{"question": f"{n}+2?", "answer": n + 2} for n in range(60)])
    options = ["--environment.tools", f"[calculator, {tmp_path}/own.py:add]", "--environment.data", str(rows)]
    assert main(["check-env", "tools", *options]) == 0
    assert "9 of 9" in capsys.readouterr().out


def test_files_are_removed_at_the_end_of_an_episode() -> None:
    files = FileSystem()
    environment = ToolEnvironment(tools=[files])
    environment.reset(environment.tasks("train")[0])
    assert files.names()
    environment.step({"agent": Message("assistant", "<answer>0</answer>")})
    assert files.names() == []


@pytest.mark.parametrize("options", [{}, {"tools": ["calculator"], "max_turns": 1}, {"shaping": 0.0, "max_turns": 2}])
def test_the_contract(options: dict[str, Any]) -> None:
    check_environment(ToolEnvironment(**options)).raise_on_failure()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"max_output": 0}, "max_output is 0"),
        ({"shaping": 0.5}, "shaping is 0.5"),
        ({"tools": ["calculatr"]}, "did you mean 'calculator'"),
        ({"tools": ["./t.py:add"]}, "a function is given itself, or ./FILE.py:NAME in a configuration"),
        ({"tools": [undescribed]}, "docstring has no description for the argument 'a'; annotate"),
        ({"tools": [undefined]}, "the function undefined: name 'Absent' is not defined; annotate"),
        ({"tools": [waiting]}, "the function waiting is async or yields"),
        ({"tools": [yielding]}, "the function yielding is async or yields"),
        (
            {"tools": [nameless]},
            "the function nameless has a positional-only argument, 'a'; calls name each argument, so replace it",
        ),
        ({"tools": [any_number]}, r"has a variadic positional argument, 'numbers'"),
        ({"tools": [Calculator]}, "call it: Calculator()"),
        ({"tools": ["calculator", Calculator()]}, "tools: two are named 'calculator'"),
        ({"tools": [Echo()]}, "give `data`"),
        ({"tools": []}, "give `data`"),
        ({"kinds": ["art"]}, "choose from arithmetic"),
        ({"kinds": []}, "choose from arithmetic"),
        ({"tools": ["calculator"], "kinds": ["files"]}, "need the tools file_system"),
        ({"kinds": ["files"], "data": "x.jsonl"}, "both given"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        ToolEnvironment(**options)


def test_two_tools_of_a_set_with_one_name_are_named() -> None:
    with pytest.raises(ConfigurationError, match="'echo'"):
        ToolEnvironment(tools=["calculator", Echo(), Pair()]).tools("agent")


def test_lookups_need_the_embedded_corpus(tmp_path: Path) -> None:
    corpus = rows_file(tmp_path / "c.jsonl", [{"title": "T", "text": "words"}])
    assert ToolEnvironment(tools=["calculator", WebSearch(corpus=corpus)]).kinds == ("arithmetic",)
    assert ToolEnvironment(tools=["calculator", "web_search"]).kinds == ("arithmetic", "lookup")


def test_every_built_in_name_makes_its_tool() -> None:
    for name in BUILT_IN:
        (tool,) = ToolEnvironment(tools=[name], data="x.jsonl").toolbox.items
        assert isinstance(tool, Tool)
        assert tool.schema.name == name


def test_names_and_classes_in_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    tools = [
        "calculator",
        {"class_path": "FileSystem", "init_args": {"max_files": 5}},
        {"class_path": "mrlm_environments.WebSearch", "init_args": {"results": 2}},
    ]
    assert main(["check-env", "tools", "--environment.tools", json.dumps(tools)]) == 0
    assert "9 of 9" in capsys.readouterr().out
    misspelt = json.dumps(tools).replace("max_files", "max_file")
    assert main(["check-env", "tools", "--environment.tools", misspelt]) == 2
    assert "did you mean 'max_files'" in capsys.readouterr().err
