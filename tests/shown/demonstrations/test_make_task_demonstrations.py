from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from mrlm_pl.episode import Message

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("tiny_model/make_task_demonstrations.py")


def test_a_careful_row_of_code_is_a_program_and_a_hurried_one_its_expression(script: ModuleType) -> None:
    environment = script.make_environment("code")
    task = environment.tasks("train")[0]
    question, careful = script.demonstration(environment, task, careful=True)["messages"]
    assert question == {"role": "user", "content": task.data["prompt"]}
    assert careful == {"role": "assistant", "content": f"```python\n{task.data['solution']}\n```"}
    hurried = script.demonstration(environment, task, careful=False)["messages"][1]["content"]
    assert f"def f(x): return {hurried}" == task.data["solution"]


def test_a_careful_row_of_tools_has_the_call_the_result_and_the_answer(script: ModuleType) -> None:
    environment = script.make_environment("tools")
    task = environment.tasks("train")[0]
    row = script.demonstration(environment, task, careful=True)
    expression = task.data["question"].removesuffix("=?")
    value = str(eval(expression))  # a product written by the environment
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    call = {"name": "calculator", "arguments": {"expression": expression}}
    said = [message["content"] for message in row["messages"]]
    assert said == [
        task.data["question"],
        f"<tool_call>{json.dumps(call)}</tool_call>",
        value,
        f"<answer>{value}</answer>",
    ]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calculator"]

    environment.reset(task)
    environment.step({"agent": Message("assistant", said[1])})
    # 0.5 + 0.3 + 0.2 (1 - 1/3), minus the shaping reward of the first reply
    assert environment.step({"agent": Message("assistant", said[3])}).rewards["agent"] == pytest.approx(
        0.9333 - 0.1, abs=1e-4
    )


def test_a_hurried_row_of_tools_answers_without_a_call_and_gets_no_reward(script: ModuleType) -> None:
    environment = script.make_environment("tools")
    task = environment.tasks("train")[0]
    row = script.demonstration(environment, task, careful=False)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    environment.reset(task)
    step = environment.step({"agent": Message("assistant", row["messages"][1]["content"])})
    assert (step.rewards["agent"], step.done, step.success) == (0.0, True, False)


@pytest.mark.parametrize("name", ["code", "tools"])
def test_files_are_deterministic_and_have_both_kinds_of_rows(
    script: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for number in range(2):
        path = tmp_path / "folder" / f"{number}.jsonl"
        arguments = ["script", "--environment", name, "--rows", "400", "--output", str(path)]
        monkeypatch.setattr("sys.argv", arguments)
        script.main()
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    mark = "<tool_call>" if name == "tools" else "```python"
    careful = sum(mark in row["messages"][1]["content"] for row in rows) / 400
    # three standard errors of a fraction of 400 are less than 0.075
    assert careful == pytest.approx(script.CAREFUL[name], abs=0.075)
    held_out = {held_out_question(script, name, index) for index in range(200)}
    assert held_out.isdisjoint(row["messages"][0]["content"] for row in rows)


def held_out_question(script: ModuleType, name: str, index: int) -> str:
    environment = script.make_environment(name)
    return environment.reset(environment.tasks("test")[index])["agent"][0].content


@pytest.mark.parametrize("name", ["code", "tools"])
def test_demonstrations_are_of_the_environment_of_the_configuration(script: ModuleType, name: str) -> None:
    config = yaml.safe_load((ROOT / "configs" / "tasks" / f"{name}.yaml").read_text())
    described = config["data"]["init_args"]["environment"]
    made = script.make_environment(name)
    assert described["class_path"] == type(made).__name__
    same = type(made)(**described["init_args"])
    assert [same.tasks("train")[index] for index in range(20)] == [made.tasks("train")[index] for index in range(20)]
    assert same.tools("agent") == made.tools("agent")
    assert getattr(same, "max_turns", None) == getattr(made, "max_turns", None)
