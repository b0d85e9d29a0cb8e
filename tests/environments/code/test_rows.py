from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.code.rows import program_of, task_data

from mrlm_pl.environment.tasks import split_of
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError

ONE, TWO = "def f(x):\n    return 1\n", "def f(x):\n    return 2\n"


@pytest.mark.parametrize(
    "reply",
    [
        TWO,
        f"```python\n{TWO}```",
        f"```py\n{TWO}```",
        f"```Python3\n{TWO}```",
        f"```\n{TWO}```",
        f"``` python \n{TWO}```",
        f'```python title="a.py"\n{TWO}```\nThat is it.',
        f"```python\n{TWO}",
        f"Sure:\n```python\n{TWO}```\nand so on",
        f"```python\n{ONE}```\nRather:\n```python\n{TWO}```",
        f"```python\n{TWO}```\nUse it:\n```python\nprint(f(1))\n```",
        f"```python\n{TWO}```\nRun it:\n```bash\npython a.py\n```",
        f"```text\n{ONE}```\n```\n{TWO}```",
        f"1. Do this:\n   ```python\n{''.join(f'   {line}' for line in TWO.splitlines(True))}   ```\n",
        f"```python\r\n{TWO}```".replace("\n", "\r\n").replace("\r\r", "\r"),
    ],
    ids=range(15),
)
def test_the_program_in_a_reply(reply: str) -> None:
    assert program_of(reply, "", "f").replace("\r", "").rstrip() == TWO.rstrip()


def test_definitions_are_looked_for_by_whole_name() -> None:
    assert program_of("```\ndef f(x): return 2\n```\n```\ndef fg(x): return f(x)\n```", "", "f").startswith("def f(x)")
    assert program_of("```\nasync def f(x): return 2\n```\n```\npass\n```", "", "f").startswith("async def f(x)")
    assert program_of("```\nclass f: pass\n```\n```\npass\n```", "", "f").startswith("class f")
    assert program_of("```\none = 1\n```\n```\ntwo = 2\n```", "", None) == "two = 2\n"


def test_a_body_goes_under_the_given_head() -> None:
    head = "def f(x):\n"
    assert program_of("    return 2\n", head, "f") == "def f(x):\n    return 2\n"
    assert program_of("```\n\n    return 2\n```", head, "f") == "def f(x):\n\n    return 2\n"
    assert program_of("\treturn 2", head, "f") == "def f(x):\n\treturn 2"
    assert program_of("def f(x): return 2", head, "f") == "def f(x): return 2"
    assert program_of("    return 2", "", "f") == "    return 2"


@pytest.mark.parametrize(
    "reply", ["```" + " " * 100_000 + "x y", "```\n" * 25_000, " " * 100_000, "```" + "\t" * 100_000, "`" * 100_000]
)
def test_reading_takes_linear_time(reply: str) -> None:
    started = time.process_time()
    program_of(reply, "def f(x):\n", "f")
    assert time.process_time() - started < 1.0


def test_a_row_of_humaneval() -> None:
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c):\n    assert c(1) == 2\n"}
    data = task_data(row)
    assert (data["given"], data["entry"], data["solution"]) == ("def f(x):\n", "f", None)
    assert task_data({**row, "canonical_solution": "    return 2\n"})["solution"] == "def f(x):\n    return 2\n"


def test_a_row_of_mbpp() -> None:
    tests = ["assert len(f(math.floor(1.5))) == 1", "assert sum(g(2)) == 2"]
    code = "def g(x): return [x]\ndef f(x): return g(x)"
    data = task_data({"text": "T", "test_list": tests, "code": code})
    assert data["names"] == ["f", "g"]
    assert data["prompt"] == "T\nIt is called like this: f(math.floor(1.5))"
    assert "import math" in data["given"]
    assert task_data({"prompt": "P", "test_list": tests})["names"] == ["f", "g"], "without a program as well"
    shadowing = {"text": "T", "test_list": ["assert sum([1]) == 1"], "code": "def sum(x): return x[0]"}
    assert task_data(shadowing)["names"] == ["sum"], "a task may have the name of a built-in function"


OWN = {"prompt": "P", "entry_point": "f", "pairs": [[[1], 2]]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": None, "entry_point": None}, "not a name"),
        ({"entry_point": "f x"}, "'f x'"),
        ({"pairs": []}, "assert nothing"),
        ({"pairs": [["abc", "cba"]]}, "not a list"),
        ({"pairs": [[[1]]]}, "unpack"),
        ({"pairs": 5}, "iterable"),
        ({"pairs": [[[1], float("nan")]]}, "malformed"),
        ({"pairs": None, "test": "x"}, "TypeError"),
        ({"test_list": []}, "empty"),
        ({"test_list": ["assert 1 == 1"]}, "no function"),
        ({"test_list": ["assert f("]}, "SyntaxError"),
        ({"test_list": ["f(1)"]}, "assert nothing"),
    ],
    ids=range(12),
)
def test_bad_rows_are_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    rows = write(tmp_path / "my.jsonl", [{**OWN, **change}])
    with pytest.raises(DataError, match=r"my\.jsonl, row 1: .*a row is .*entry_point") as caught:
        CodeEnvironment(data={"train": rows}).tasks("train")
    assert told in str(caught.value)


@pytest.mark.parametrize("missing", ["prompt", "entry_point", "pairs"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(KeyError, match=missing if missing != "pairs" else "test"):
        task_data({key: value for key, value in OWN.items() if key != missing})


def test_tests_that_test_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="assert nothing"):
        task_data({"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c):\n    c(1)\n"})
    with pytest.raises(IndentationError):
        task_data({"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c):"})


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_own_rows_of_a_file(tmp_path: Path) -> None:
    rows = [
        {**OWN, "prompt": f"Add {n}.", "pairs": [[[1], 1 + n], [[-n], 0]], "solution": f"def f(x): return x + {n}"}
        for n in range(60)
    ]
    environment = CodeEnvironment(data=write(tmp_path / "own.jsonl", rows))
    prompts = {split: {task.data["prompt"] for task in environment.tasks(split)} for split in ("train", "test")}
    assert all(split_of(prompt) == "train" for prompt in prompts["train"])
    assert not prompts["train"] & prompts["test"]
    task = environment.tasks("test")[0]
    environment.reset(task)
    gold = environment.gold(task)
    assert gold is not None
    assert environment.step({"agent": Message("assistant", gold["agent"][0])}).rewards["agent"] == 2.0


def test_code_that_an_own_task_gives(tmp_path: Path) -> None:
    row = {**OWN, "given": "def half(x): return x // 2\n", "pairs": [[[8], 4]]}
    path = write(tmp_path / "own.jsonl", [row])
    environment = CodeEnvironment(data={"train": path})
    (task,) = environment.tasks("train")
    assert environment.gold(task) is None
    environment.reset(task)
    assert environment.step({"agent": Message("assistant", "def f(x): return half(x)")}).rewards["agent"] == 2.0
    with pytest.raises(ConfigurationError, match="test"):
        environment.tasks("test")


def test_faults_of_a_file_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "Q", "entry_point": "f"}])
    with pytest.raises(DataError, match=r"d\.jsonl, row 1: the field 'test' is missing.*'entry_point', 'prompt'"):
        CodeEnvironment(data={"train": path, "validation": path}).tasks("train")
    with pytest.raises(DataError, match=r"e\.jsonl"):
        CodeEnvironment(data=str(tmp_path / "e.jsonl")).tasks("train")
