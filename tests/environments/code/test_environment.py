from __future__ import annotations

import ast
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.code.generated import _RULES, KINDS, MAX_DIFFICULTY, _argument, _tests, _value, generate_data
from mrlm_environments.code.rows import task_data

from mrlm_pl.cli.main import main
from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import HOSTILE_REPLIES, check_environment
from mrlm_pl.environment.trial import SPAM
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.sandbox import STRENGTH, Sandbox
from tests.support.environments.data_sets import files_of, rows_of

ROW = {
    "prompt": "Write double(x), which returns x twice.",
    "entry_point": "double",
    "pairs": [[[1], 2], [[4], 8], [["ab"], "abab"], [[[1, 2]], [1, 2, 1, 2]]],
}
RIGHT = "def double(x): return x * 2"
HUMANEVAL = {
    "prompt": "def shift(s):\n    return s[1:] + s[:1]\n\n\ndef unshift(s):\n    '''Undo shift.'''\n",
    "entry_point": "unshift",
    "canonical_solution": "    return s[-1:] + s[:-1]\n",
    "test": "def check(candidate):\n    for word in ('abc', 'xy', 'hello'):\n"
    "        assert candidate(shift(word)) == word\n    assert (\n        candidate('') ==\n        ''\n    )\n",
}
MBPP = {
    "text": "Write a function for the area of a circle.",
    "code": "import math\ndef area(r):\n    return math.pi * r * r",
    "test_imports": ["import math"],
    "test_setup_code": "radius = 2",
    "test_list": ["assert math.isclose(area(radius), 12.566370614359172)", "assert area(0) == 0"],
}


TREE: dict[str, Any] = {
    "text": "Write a function to check if a binary tree has two children.",
    "code": "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
    "def is_full(root): return root.left is not None and root.right is not None",
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)\n"
    "root1 = Node(1)\nroot1.left = Node(2)\nroot1.right = Node(3)",
    "test_list": [
        "assert is_full(root) == False",
        "assert is_full(root1) == True",
        "assert is_full(root1.left) == False",
    ],
}
"""Set-up that builds objects of the program's own class, as rows 367 and 927 of MBPP have it."""
PLUS = {
    **HUMANEVAL,
    "test": "import numpy as np\ndef check(candidate):\n    for inp, exp in ((['abc'], 'cab'), (['xy'], 'yx')):\n"
    "        assert np.array_equal([candidate(*inp)], [exp])\n",
}
"""Tests that import numpy, as HumanEval+ has them."""


def task_of(row: Mapping[str, Any]) -> Task:
    return Task("code", "train", 0, 0, task_data(row))


def graded(reply: str, row: Mapping[str, Any] = ROW, **options: Any) -> Step:
    environment = CodeEnvironment(**options)
    environment.reset(task_of(row))
    return environment.step({"agent": Message("assistant", reply)})


def earned(reply: str, row: Mapping[str, Any] = ROW, **options: Any) -> float:
    return graded(reply, row, **options).rewards["agent"]


def test_the_parts_of_a_reward() -> None:
    step = graded(RIGHT)
    assert step.components["agent"] == {"tests": 1.0, "all_passed": 1.0, "invalid": 0.0}
    assert (step.rewards["agent"], step.success, step.stop_reason) == (2.0, True, "answered")
    assert step.metrics["valid"] == 1.0
    partly = graded("def double(x): return x + x if isinstance(x, int) else x[:1] * 4")
    assert partly.components["agent"] == {"tests": 0.5, "all_passed": 0.0, "invalid": 0.0}
    assert (partly.rewards["agent"], partly.success) == (0.5, False)
    assert earned("def double(x): return x + 1 if x == 1 else None") == 0.25
    assert earned("def double(x): return None") == 0.0
    assert earned("def double(x): raise ValueError(x)") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "",
        " \n",
        "I do not know.",
        "def double(x) return x",
        "```python\n```",
        "def other(x): return x * 2",
        "raise RuntimeError('on import')",
        f"{RIGHT}\nimport no_such_module",
        f"{RIGHT}\nimport sys; sys.exit(0)",
        f"{RIGHT}\nimport os; os._exit(0)",
        f"{RIGHT}\nraise SystemExit",
        "double = 1 +",
        "x" * 200_000,
        "#" * 100_000 + f"\n{RIGHT}",
        f"{RIGHT}\nx = '\0'",
        f"{RIGHT}\nx = '\ud800'",
    ],
    ids=range(16),
)
def test_a_program_that_is_missing_or_cannot_be_loaded_costs(program: str) -> None:
    step = graded(program)
    assert step.components["agent"] == {"tests": 0.0, "all_passed": 0.0, "invalid": -0.5}
    assert step.rewards["agent"] == -0.5
    assert (step.stop_reason, step.success, step.metrics["valid"]) == ("invalid_program", False, 0.0)


@pytest.mark.parametrize("program", [f"{RIGHT}\nwhile True: pass", "def double(x):\n    while x != 'ab': pass"])
def test_a_program_without_end_costs(program: str) -> None:
    assert graded(program, sandbox=Sandbox(wall_seconds=0.6)).components["agent"]["invalid"] == -0.5


ALWAYS_EQUAL = """
class Yes(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
def double(x): return Yes()
"""
FRAMES = """
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        for place in (frame.f_locals, frame.f_globals):
            for name, value in list(place.items()):
                if name in ("tally", "request", "namespace", "tests", "expected"):
                    try: value.update(passed=4, run=4)
                    except Exception: pass
        frame = frame.f_back
"""
PATCHED = """
import builtins, json, os, sys, gc
for module in list(sys.modules.values()):
    for name in ("grade", "encode", "decode", "counted", "record", "_run", "share"):
        if hasattr(module, name):
            setattr(module, name, lambda *a, **k: {"passed": 4, "run": 4, "gone": False, "fault": ""})
builtins.AssertionError = builtins.Exception = type("Fine", (BaseException,), {})
builtins.isinstance = lambda *a: True
json.dumps = lambda *a, **k: '{"ok": {"passed": 4, "run": 4}}'
def double(x): return None
"""
FORGED = """
import os
for number in range(3, 64):
    try: os.write(number, b'{"ok": {"passed": 4, "run": 4, "gone": false, "fault": ""}}\\n' * 5)
    except OSError: pass
def double(x): return None
"""
PRINTED = """
print('{"ok": {"passed": 4, "run": 4}}'); print("PASSED 4 of 4"); print("OK")
def double(x):
    print('{"passed": 4, "run": 4}'); print("passed")
"""


@pytest.mark.parametrize(
    "program",
    [ALWAYS_EQUAL, FRAMES, PATCHED, FORGED, PRINTED, "import os\ndef double(x): os._exit(0)"]
    + [
        f"import sys\ndef double(x): {code}"
        for code in ("sys.exit(0)", "raise SystemExit(0)", "raise KeyboardInterrupt")
    ]
    + ["def double(x): raise AssertionError", "def double(x): return NotImplemented", "def double(x): return double"],
    ids=range(12),
)
def test_cheats_earn_nothing(program: str) -> None:
    step = graded(program)
    assert step.rewards["agent"] <= 0
    assert step.success is False


def test_leaving_after_a_right_answer_earns_nothing() -> None:
    program = "import os\ncalls = []\ndef double(x):\n    calls.append(x)\n    {0}\n    return x * 2"
    assert earned(program.format("len(calls) < 2 or os._exit(0)")) == 0.0
    assert earned(program.format("len(calls) < 4 or os._exit(0)")) == 0.0
    steps = {
        **HUMANEVAL,
        "test": "def check(f):\n" + "".join(f"    x = f('ab')\n    assert x == 'b{n}'\n" for n in "abcd"),
    }
    once = "calls = []\ndef unshift(s):\n    calls.append(s)\n    if len(calls) > 1: raise ValueError\n    return 'ba'"
    assert earned(once, steps) == 0.25, "an error that ends the tests hides none of them"


def test_helpers_of_the_prompt_are_the_tasks_own() -> None:
    assert earned("```python\ndef unshift(s):\n    return s[-1:] + s[:-1]\n```", HUMANEVAL) == 2.0
    assert earned("def shift(s): return s\ndef unshift(s): return s", HUMANEVAL) == 0.25, "only '' is its own shift"
    assert earned("shift = None", HUMANEVAL) == -0.5, "the prompt's head is not an answer"


@pytest.mark.parametrize(
    "reply",
    ["    return s[-1:] + s[:-1]\n", "```python\n    return s[-1:] + s[:-1]\n```", "\n\n    return shift(shift(s)) if"
     " len(s) == 3 else s[-1:] + s[:-1]"],
)  # fmt: skip
def test_a_body_alone_is_put_under_its_head(reply: str) -> None:
    assert earned(reply, HUMANEVAL) == 2.0


def test_mbpp_with_imports_and_setup() -> None:
    assert earned("```py\nimport math\ndef area(r): return math.pi * r ** 2\n```", MBPP) == 2.0
    assert earned("def area(r): return 3.14 * r * r", MBPP) == 0.5
    assert earned("math = None\nradius = 0\ndef area(r): return 0", MBPP) == 0.5, "the tests have their own radius"


def test_a_setup_that_builds_objects_of_the_program() -> None:
    assert earned(TREE["code"], TREE) == 2.0
    assert earned(f"{TREE['code']}\ndef is_full(root): return False", TREE) == pytest.approx(2 / 3)
    assert earned("def is_full(root): return True", TREE) == -0.5, "the class is the program's to define"
    always = "class Node:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True\n"
    assert earned(f"{always}def is_full(root): return Node(1)", TREE) <= 0
    (message,) = CodeEnvironment().reset(task_of(TREE))["agent"]
    assert "called like this: is_full(root)\nDefine Node as well. This code comes first:" in message.content
    assert "root1.right = Node(3)" in message.content
    without_code = {key: value for key, value in TREE.items() if key != "code"}
    assert task_data(without_code)["names"] == ["Node", "is_full"]
    assert earned(TREE["code"], without_code) == 2.0
    with pytest.raises(ValueError, match="test_setup_code uses Tree, which its code does not define"):
        task_of({**TREE, "test_setup_code": "root = Tree(1)"})


def test_tests_that_need_a_package(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plus.jsonl"
    path.write_text(f"{json.dumps(PLUS)}\n{json.dumps(HUMANEVAL)}\n")
    data = {"test": str(path)}
    assert CodeEnvironment(data).tasks("test").size == 1
    assert "skipped 1 of 2 rows" in caplog.text
    assert "the task needs numpy, which the sandbox does not have; let it in: sandbox.packages: [numpy]" in caplog.text
    environment = CodeEnvironment(data, sandbox=Sandbox(packages=("numpy",)))
    task = environment.tasks("test")[0]
    environment.reset(task)
    assert environment.step({"agent": Message("assistant", task.data["solution"])}).rewards["agent"] == 2.0
    path.write_text(f"{json.dumps(PLUS)}\n")
    with pytest.raises(DataError, match=r"sandbox\.packages: \[numpy\]"):
        CodeEnvironment(data).tasks("test")


def test_modules_that_a_row_uses_without_an_import() -> None:
    row = {
        "prompt": "from __future__ import annotations\ndef area(r: math.Radius) -> float:\n    '''Of a circle.'''\n",
        "entry_point": "area",
        "canonical_solution": "    return math.pi * r ** 2\n",
        "test": "def check(candidate):\n    assert math.isclose(candidate(2), 4 * math.pi)\n",
    }
    assert earned("    return math.pi * r ** 2", row) == 2.0
    assert earned("def area(r): return math.pi * r * r", row) == 2.0
    assert earned("def area(r): return 4 * 3.141592653589793", row) == 2.0
    test = "def check(candidate, string='a'):\n    assert string.upper() == 'A'\n    assert candidate(0) == 0"
    assert "import string" not in task_data({**row, "test": test})["given"], "the tests' own name"


def test_a_prompt_may_end_in_a_bare_head() -> None:
    row = {"prompt": "import math\ndef f(x):\n", "entry_point": "f", "test": "def check(f):\n    assert f(4) == 2"}
    assert earned("    return math.isqrt(x)", row) == 2.0
    assert earned("def f(x): return math.isqrt(x)", row) == 2.0
    for prompt in ("'''", "def f(x:"):
        with pytest.raises(SyntaxError):
            task_of({**row, "prompt": prompt})
    with pytest.raises(SyntaxError):
        task_of({**ROW, "solution": "def double(x) return"})


def test_a_huge_value_does_not_lose_the_other_tests() -> None:
    row = {**ROW, "pairs": [[[1], 2], [["x" * 10], "x" * 20]]}
    program = "def double(x): return 'y' * (5 << 20) if x == 1 else x * 2"
    assert graded(program, row).components["agent"] == {"tests": 0.5, "all_passed": 0.0, "invalid": 0.0}


def test_a_program_that_only_raises_earns_nothing() -> None:
    test = "def check(candidate):\n    assert candidate('ab') == 'ba'\n    assert True, 'good for debugging'\n"
    assert earned("def unshift(s): raise ValueError", {**HUMANEVAL, "test": test}) == 0.0
    assert earned("def unshift(s): return s[::-1]", {**HUMANEVAL, "test": test}) == 2.0


def test_what_the_agent_sees() -> None:
    (message,) = CodeEnvironment().reset(task_of(MBPP))["agent"]
    assert message.content == f"{MBPP['text']}\nIt is called like this: area(radius)"
    messages = CodeEnvironment(instruction="Be brief.", system_prompt="You write code.").reset(task_of(ROW))["agent"]
    assert [(seen.role, seen.content) for seen in messages] == [
        ("system", "You write code."),
        ("user", f"{ROW['prompt']}\nBe brief."),
    ]
    (message,) = CodeEnvironment().reset(task_of(HUMANEVAL))["agent"]
    assert HUMANEVAL["prompt"] in message.content


def test_feedback_reveals_nothing_of_the_tests() -> None:
    row = {**ROW, "pairs": [[[7316], 14632], [["secret"], "secretsecret"]]}
    environment = CodeEnvironment(max_attempts=6)
    environment.reset(task_of(row))
    seen = []
    for program in (
        "def double(x): return None",
        "def double(x): raise ValueError(repr(x))",
        "def double(x):\n    import os; os._exit(0)",
        "def double(x):\n    while True: pass",
        "1 +",
    ):
        environment.sandbox = Sandbox(wall_seconds=1.0 if "while True" in program else 30.0)
        step = environment.step({"agent": Message("assistant", program)})
        assert not step.done
        assert step.success is None
        seen.append(step.observations["agent"][0].content)
    assert seen[:2] == ["0 of 2 tests passed. Try again."] * 2
    assert "ended its process" in seen[2]
    assert "too long" in seen[3]
    assert "SyntaxError" in seen[4]
    assert not any(secret in text for text in seen for secret in ("7316", "14632", "secret", "assert"))
    environment.sandbox = Sandbox(wall_seconds=30.0)
    last = environment.step({"agent": Message("assistant", RIGHT)})
    assert last.done
    assert last.rewards["agent"] == 2.5, "2, after a program that earned -.5"


def test_attempts_end() -> None:
    environment = CodeEnvironment(max_attempts=2)
    environment.reset(task_of(ROW))
    assert not environment.step({"agent": Message("assistant", "no")}).done
    assert environment.step({"agent": Message("assistant", "no")}).done
    environment.reset(task_of(ROW))
    assert not environment.step({"agent": Message("assistant", "no")}).done, "a new episode has its own attempts"
    assert environment.step({"agent": Message("assistant", RIGHT)}).success


def test_the_return_is_the_score_of_the_last_program() -> None:
    """Half of the tests pass, then none, then all: 0.5, the change of -0.5 - 0.5 and that of 2 + 0.5."""
    environment = CodeEnvironment(max_attempts=3)
    environment.reset(task_of({**ROW, "pairs": [[[2], 4], [[3], 6]]}))
    programs = ("def double(x): return 4", "no", RIGHT)
    steps = [environment.step({"agent": Message("assistant", program)}) for program in programs]
    assert [step.rewards["agent"] for step in steps] == [0.5, -1.0, 2.5]
    assert steps[-1].components["agent"] == {"tests": 1.0, "all_passed": 1.0, "invalid": 0.5}


def test_metrics_name_the_level() -> None:
    assert graded(RIGHT).metrics == {"valid": 1.0, "isolation": float(STRENGTH[Sandbox().isolation])}
    assert graded(RIGHT, sandbox=Sandbox(level="limits")).metrics["isolation"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difficulty", range(1, MAX_DIFFICULTY + 1))
def test_generated_tasks_can_be_solved_and_not_by_a_constant(kind: Any, difficulty: int) -> None:
    for index in range(300):
        task = generate_data(Random(index), [kind], (difficulty, difficulty))
        namespace: dict[str, Any] = {}
        exec(task["solution"], namespace)
        parts = [re.fullmatch(r"assert f\(\*(.*)\) == (.*)", test) for test in task["tests"]]
        pairs = [(ast.literal_eval(part[1]), ast.literal_eval(part[2])) for part in parts if part]
        values = [namespace["f"](*arguments) for arguments, _ in pairs]
        assert values == [value for _, value in pairs]
        assert len(values) == len(task["tests"]) == 5
        assert any(value != values[0] for value in values), task["prompt"]
        assert values != [arguments[0] for arguments, _ in pairs], task["prompt"]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_tests_tell_above_from_at_least(kind: Any) -> None:
    compared = 0
    for index in range(600):
        task = generate_data(Random(index), [kind], (1, MAX_DIFFICULTY))
        for strict, weak in ((">", ">="), ("<", "<=")):
            if strict in task["solution"]:
                namespace: dict[str, Any] = {}
                exec(task["solution"].replace(strict, weak), namespace)
                with pytest.raises(AssertionError):
                    exec("\n".join(task["tests"]), namespace)
                compared += 1
    assert compared > 20


def test_every_rule_has_arguments_that_tell_it_from_constants() -> None:
    """The draw of arguments ends for every rule and number: else a task would be drawn forever."""
    for kind in KINDS:
        for rule in _RULES[kind]:
            for number in {rule.low, min(rule.high, 9), rule.high}:
                expression = rule.expression.format(a=number)
                assert len(_tests(Random(0), kind, number, expression)) == 5
                if not isinstance(_value(expression, _argument(Random(0), kind)), int):
                    assert len(_tests(Random(0), kind, number, f"len({expression})")) == 5


def test_a_worked_example_of_each_step() -> None:
    """The descriptions say what Python computes, by hand."""
    found: dict[str, str] = {}
    for index in range(3000):
        task = generate_data(Random(index), [KINDS[index % 3]], (3, 3))
        description = task["prompt"].removeprefix("Write f(x) that returns ").removesuffix(".")
        found[description] = task["solution"].removeprefix("def f(x): return ")
    conditional = next(text for text in found if " if 5 is in x, else 0" in text)
    assert found[conditional] == f"{conditional[0]} if 5 in x else 0"
    nested = next(text for text in found if text.startswith("3 times (") and "plus the sum of x)" in text)
    number = nested.removeprefix("3 times (").partition(" ")[0]
    assert found[nested] == f"3*(sum(x)+{number})"


def test_splits_share_no_task_and_gold_earns_the_most() -> None:
    environment = CodeEnvironment()
    prompts = {s: {environment.tasks(s)[n].data["prompt"] for n in range(150)} for s in ("train", "validation", "test")}
    assert not prompts["train"] & prompts["test"]
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["validation"] & prompts["test"]
    for index in range(12):
        task = environment.tasks("test")[index]
        environment.reset(task)
        gold = environment.gold(task)
        assert gold is not None
        assert environment.step({"agent": Message("assistant", gold["agent"][0])}).rewards["agent"] == 2.0
        for reply in (SPAM, "def f(x): return x", "def f(x): return 0", *HOSTILE_REPLIES[:5]):
            environment.reset(task)
            assert environment.step({"agent": Message("assistant", reply)}).rewards["agent"] < 1.0


@pytest.mark.parametrize("options", [{"max_attempts": 2}, {"kinds": ["number"], "difficulty": (1, 1)}])
def test_the_contract_holds(options: dict[str, Any]) -> None:
    report = check_environment(CodeEnvironment(**options), tasks_per_split=3)
    report.raise_on_failure()
    assert "earn 2," in next(check.message for check in report.checks if check.name == "best replies")


def test_episodes_side_by_side() -> None:
    environment = CodeEnvironment()
    tasks = [environment.tasks("train")[n] for n in range(12)]
    earnings: dict[int, float] = {}

    def play(number: int) -> None:
        own = environment.copy()
        own.reset(tasks[number])
        reply = tasks[number].data["solution"] if number % 2 else "def f(x): return None"
        earnings[number] = own.step({"agent": Message("assistant", reply)}).rewards["agent"]

    threads = [threading.Thread(target=play, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert earnings == {number: 2.0 if number % 2 else 0.0 for number in range(12)}


@pytest.mark.parametrize(
    "options",
    [{"difficulty": (2, 1)}, {"difficulty": (1, 4)}, {"difficulty": (1,)}, {"kinds": []}, {"kinds": ["art"]},
     {"max_attempts": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        CodeEnvironment(**options)


def test_it_is_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "code", "--environment.kinds", '["text"]']) == 0
    assert "8 of 8" in capsys.readouterr().out


def dataset_rewards(path: Path, body: bool = False) -> list[float]:
    """Return the rewards of the reference solutions of a file's rows."""
    # One reference of MBPP computes for three seconds.
    environment = CodeEnvironment(data={"train": str(path), "test": str(path)}, sandbox=Sandbox(wall_seconds=60.0))
    rewards = []
    for task, row in zip(environment.tasks("test"), rows_of(path), strict=True):
        environment.reset(task)
        gold = environment.gold(task)
        assert gold is not None
        reply = row["canonical_solution"] if body else gold["agent"][0]
        rewards.append(environment.step({"agent": Message("assistant", reply)}).rewards["agent"])
    return rewards


@pytest.mark.parametrize("path", files_of("humaneval", "humaneval.jsonl.gz"))
@pytest.mark.parametrize("body", [False, True], ids=["program", "body"])
def test_canonical_solutions_of_humaneval_earn_the_maximum(path: Path, body: bool) -> None:
    assert dataset_rewards(path, body) == [2.0] * len(rows_of(path))


@pytest.mark.parametrize("path", files_of("mbpp", "mbpp_sample.jsonl"))
def test_reference_programs_of_mbpp_earn_the_maximum(path: Path) -> None:
    assert dataset_rewards(path) == [2.0] * len(rows_of(path))
