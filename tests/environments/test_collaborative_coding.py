from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.code.rows import task_data
from mrlm_environments.code.rows import tests_of as hidden_tests
from mrlm_environments.collaborative_coding.aux_use import AuxUse, aux_use, defines
from mrlm_environments.collaborative_coding.environment import CollaborativeCodingEnvironment
from mrlm_environments.collaborative_coding.gold import split_solution
from mrlm_environments.collaborative_coding.revealed import hold_out

from mrlm_pl.cli.main import main
from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.sandbox import Sandbox, grade
from tests.support.environments.data_sets import files_of, rows_of

ROW = {
    "prompt": "Write f(x), twice x plus 1.",
    "entry_point": "f",
    "pairs": [[[1], 3], [[2], 5], [[0], 1], [[-4], -7]],
    "solution": "def f(x):\n    return 2 * x + 1",
}
AUX = "def aux(x):\n    return 2 * x"
MAIN = "def f(x):\n    part = aux(x)\n    return part + 1"
HUMANEVAL = {
    "prompt": "def f(x):\n    '''Twice.'''\n",
    "entry_point": "f",
    "test": "N = 4\ndef check(candidate):\n    assert candidate(1) == 2, 'no'\n    y = candidate(7)\n"
    "    assert y == 14\n    assert candidate(N) == 8\n    assert True\n    assert candidate(2) == 4\n"
    "    for n in range(3):\n        assert candidate(2) == 4\n        assert candidate(n) == 2 * n\n"
    "    assert candidate(5) == 10\n",
}
NAMES = ("helper_defined", "main_defined", "parses", "tests", "calls_aux", "not_thin", "ignores_aux")


def task_of(row: Mapping[str, Any] = ROW) -> Task:
    return Task("collaborative_coding", "train", 0, 0, task_data(row))


def played(helper: str, main_reply: str, row: Mapping[str, Any] = ROW, **options: Any) -> Step:
    environment = CollaborativeCodingEnvironment(**options)
    environment.reset(task_of(row))
    return environment.step({"helper": Message("assistant", helper), "main": Message("assistant", main_reply)})


@pytest.mark.parametrize(
    ("helper", "main_reply", "parts"),
    [
        (AUX, MAIN, (0.4, 0.6, 0.5, 1, 0.5, 1, 0)),  # 4.0, the maximum
        (f"Here:\n```python\n{AUX}\n```", f"```py\n{MAIN}\n```", (0.4, 0.6, 0.5, 1, 0.5, 1, 0)),
        ("I do not know.", "Neither do I.", (0, 0, 0, 0, 0, 0, 0)),
        (AUX, "pass", (0.4, 0, 0, 0, 0, 0, 0)),  # no main: nothing more
        (AUX, "def f(x):\n    print(x)", (0.4, 0, 0, 0, 0, 0, 0)),  # main without a return
        ("def aux(x):\n    print(x)", MAIN, (0, 0.6, 0.5, 0, 0, 0, 0)),  # no test passes: no bonus
        (AUX, "def f(x):\n    return aux(x) +", (0.4, 0.6, 0, 0, 0, 0, 0)),  # does not parse: nothing more
        ("def aux(x) return 2", MAIN, (0, 0.6, 0, 0, 0, 0, 0)),
        (AUX, "def f(x):\n    return 2 * x + 1", (0.4, 0.6, 0.5, 1, 0, 0, 0)),  # does not call aux
        ("def aux(x):\n    return 2 * x + 1", "def f(x):\n    return aux(x)", (0.4, 0.6, 0.5, 1, 0.5, 0, 0)),  # thin
        (AUX, "def f(x):\n    aux(x)\n    y = 2 * x\n    return y + 1", (0.4, 0.6, 0.5, 1, 0.5, 1, -0.5)),  # ignored
        (AUX, "def f(x):\n    y = aux(x)\n    return y + 1 if x > 0 else 9", (0.4, 0.6, 0.5, 0.5, 0.5, 1, 0)),
        (AUX, f"{MAIN}\n{AUX.replace('2', '9')}", (0.4, 0.6, 0.5, 1, 0.5, 1, 0)),  # aux is the helper's
        (f"{AUX}\ndef f(x):\n    return 2 * x + 1", "pass", (0.4, 0, 0, 0, 0, 0, 0)),  # f is main's
        (f"{AUX}\nimport os; os._exit(0)", MAIN, (0.4, 0.6, 0.5, 0, 0, 0, 0)),
        ("import os\ndef aux(x):\n    os._exit(0)\n    return x", MAIN, (0.4, 0.6, 0.5, 0, 0, 0, 0)),
    ],
    ids=range(16),
)
def test_levels_and_bonuses(helper: str, main_reply: str, parts: tuple[float, ...]) -> None:
    step = played(helper, main_reply)
    for agent in ("helper", "main"):
        assert step.components[agent] == pytest.approx(dict(zip(NAMES, parts, strict=True)))
        assert step.rewards[agent] == pytest.approx(sum(parts))
    assert step.success is (parts[3] == 1)
    assert step.done


def test_an_endless_program_passes_no_test() -> None:
    step = played("def aux(x):\n    while x != -4: return 2 * x\n    while True: pass", MAIN,
                  sandbox=Sandbox(wall_seconds=0.6))  # fmt: skip
    assert step.rewards["main"] == pytest.approx(1.5)
    assert step.success is False


def test_an_object_that_equals_everything_passes_no_test() -> None:
    always = "class Yes(int):\n    def __eq__(self, other): return True\n"
    step = played(f"{always}def aux(x):\n    return Yes()", "def f(x):\n    y = aux(x)\n    z = y\n    return [z][0]")
    assert step.rewards["main"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("body", "calls", "thin", "ignores"),
    [
        ("return aux(x)", True, True, False),
        ("return aux(x) + 1", True, True, False),  # a single return is a wrapper, as published
        ("'''Say.'''\n    # so\n    y: int = aux(x)\n    z = y\n    pass\n    return z", True, True, False),
        ("try:\n        return aux(x)\n    except Exception:\n        return None", True, True, False),
        ("if True:\n        return aux(x)\n    return x + 1", True, True, False),
        ("y = aux(x)\n    return y + 1", True, False, False),
        ("if x > 0:\n        return aux(x)\n    return 0", True, False, False),
        ("return list(map(aux, x))", True, True, False),
        ("y = map(aux, x)\n    return list(y)", True, False, False),
        ("aux(x)\n    return x + 1", True, False, True),
        ("aux(x), 1\n    return x + 1", True, False, True),
        ("y = aux(x)\n    return x + 1", True, False, True),
        ("_, (y, z) = aux(x)\n    return x + 1", True, False, True),
        ("y = 0\n    y += aux(x)\n    return x + 1", True, False, True),
        ("[aux(n) for n in x]\n    return x + 1", True, False, True),
        ("(y := aux(x))\n    return x + 1", True, False, True),
        ("found = []\n    found.append(aux(x))\n    return found[0] + 1", True, False, False),
        ("x.y = aux(x)\n    return x", True, False, False),
        ("x[0] = aux(x)\n    return x + 1", True, False, False),
        ("while aux(x):\n        x -= 1\n    return x", True, False, False),
        ("def inner(n):\n        return aux(n) + 1\n    return inner(x)", True, False, False),
        ("if False:\n        y = aux(x)\n    return x + 1", False, False, False),
        ("return x + 1\n    return aux(x)", False, False, False),
        ("aux = abs\n    return aux(x) + 1", False, False, False),
        ("def aux(n):\n        return n\n    y = aux(x)\n    return y + 1", False, False, False),
        ("return 'aux(x)'", False, False, False),
        ("return self.aux(x)", False, False, False),
    ],
)
def test_what_counts_as_use_of_aux(body: str, calls: bool, thin: bool, ignores: bool) -> None:
    assert aux_use(f"def f(x):\n    {body}", "f") == AuxUse(calls, thin, ignores)


def test_an_argument_of_its_name_is_not_the_helper() -> None:
    assert not aux_use("def f(x, aux=abs):\n    y = aux(x)\n    return y + 1", "f").calls
    assert not aux_use("def g(x):\n    y = aux(x)\n    return y + 1", "f").calls


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(x):\n    return 1", True),
        ("async def f(x):\n    return 1", True),
        ("def f(x):\n    return", False),
        ("def f(x):\n    def g():\n        return 1\n    g()", False),
        ("class A:\n    def f(self):\n        return 1", False),
        ("f = lambda x: 1", False),
        ("def fg(x):\n    return 1", False),
        ("def f(x):\n    return 1 +", True),  # does not parse: by its lines
        ("def f(x):\n    y = (\ndef g():\n    return 1", False),
        ("Sure: def f(x): return 1", False),
    ],
)
def test_defined_with_a_return(code: str, found: bool) -> None:
    assert defines(code, "f") is found


MONSTROUS = [
    "(" * 9000, "-" * 90000 + "1", "x" + ".a" * 40000, "x" + "()" * 40000, "[" * 150, "not " * 40000,
    "x=" * 20000 + "1", "1" + "+1" * 40000, "lambda:" * 9000 + "1", "9" * 90000,
]  # fmt: skip


@pytest.mark.parametrize("text", MONSTROUS, ids=range(len(MONSTROUS)))
def test_monstrous_programs_are_judged(text: str) -> None:
    step = played(f"def aux(x):\n    return {text}", f"def f(x):\n    y = aux(x)\n    return y, {text}")
    assert step.rewards["main"] <= 1.5


def test_both_see_the_task_and_their_part() -> None:
    row = {
        "prompt": "def f(x):\n    '''Twice.'''\n",
        "entry_point": "f",
        "test": "def check(c):\n    assert c(1) == 2\n",
    }
    seen = CollaborativeCodingEnvironment(system_prompt="Be brief.").reset(task_of(row))
    assert set(seen) == {"helper", "main"}
    for agent, own in (("helper", "Write only aux"), ("main", "Write only f")):
        assert [message.role for message in seen[agent]] == ["system", "user"]
        assert seen[agent][1].content.startswith("```python\ndef f(x):\n    '''Twice.'''\n```\n")
        assert own in seen[agent][1].content
        assert "whole function" not in seen[agent][1].content


def test_assertions_that_are_held_out_are_not_graded() -> None:
    data = task_of(HUMANEVAL).data
    graded, revealed = hold_out(data, 2)
    assert revealed == ["assert f(1) == 2", "assert f(2) == 4"], (
        "those that stand for themselves, by the function's name"
    )
    left = [ast.unparse(node.test) for test in graded["tests"] for node in ast.walk(ast.parse(test))
            if isinstance(node, ast.Assert)]  # fmt: skip
    assert sorted(left) == sorted(
        ["y == 14", "candidate(N) == 8", "True", "candidate(n) == 2 * n", "candidate(5) == 10"]
    ), "equal ones go too"
    found = grade(Sandbox(), "def f(x):\n    return 2 * x", hidden_tests(graded))
    assert (found.passed, found.run) == (6, 6), "the loop's is reached three times, and True counts for nothing"
    assert hold_out(data, 0) == (dict(data), [])
    mbpp = task_data({"text": "T", "test_list": ["assert g(1) == 2", "assert g(3) == 6"]})
    graded, revealed = hold_out(mbpp, 5)
    assert (graded["tests"], revealed) == (["assert g(3) == 6"], ["assert g(1) == 2"]), "one is left to be graded"
    assert hold_out({**mbpp, "tests": ["assert g(1) == 2"] * 2}, 1)[1] == []


def feedback(mode: str, helper: str, main_reply: str, agent: str = "main") -> str:
    step = played(helper, main_reply, turns=2, feedback=mode)
    assert not step.done
    assert step.success is None
    (message,) = step.observations[agent]
    return message.content


def test_what_the_modes_tell() -> None:
    wrong = MAIN.replace("+ 1", "+ 5")
    again = "Write f again, better, in a fenced block."
    assert feedback("plain", AUX, wrong) == again
    assert feedback("plain", AUX, wrong, "helper") == again.replace("f ", "aux ", 1)
    assert feedback("passed", AUX, wrong) == f"Not all levels passed. {again}"
    assert feedback("level_passed", AUX, wrong).split("\n") == [
        "- aux is defined with a return: yes",
        "- f is defined with a return: yes",
        "- the program parses: yes",
        "- all tests pass: no",
        "- f calls aux: yes",
        "- f is more than a thin wrapper of aux: yes",
        "- the value of aux is used: yes",
        again,
    ]
    told = feedback("level_feedback", AUX, wrong).split("\n")
    assert told[7:] == ["0 of 2 tests passed.", "Failed: assert f(*[1]) == 3", "Failed: assert f(*[2]) == 5", again]
    half = feedback(
        "level_feedback", AUX, "def f(x):\n    y = aux(x)\n    return y + 1 if x not in (0, 2) else 0"
    ).split("\n")
    assert half[7:] == ["1 of 2 tests passed.", "Failed: assert f(*[2]) == 5", again]
    assert "NameError" in feedback("level_feedback", f"{AUX}\nnothing", MAIN)
    for mode in ("plain", "passed", "level_passed"):
        assert "assert" not in feedback(mode, AUX, wrong)


def test_two_turns_pay_what_the_last_programs_are_worth() -> None:
    environment = CollaborativeCodingEnvironment(turns=2, feedback="passed")
    environment.reset(task_of())
    first = environment.step(
        {"helper": Message("assistant", AUX), "main": Message("assistant", "def f(x):\n    return 0")}
    )
    assert first.rewards["helper"] == pytest.approx(1.5)
    second = environment.step({"helper": Message("assistant", AUX), "main": Message("assistant", MAIN)})
    assert second.done
    assert second.success
    assert second.rewards["helper"] == pytest.approx(2.5)
    assert second.components["main"]["tests"] == 1.0
    assert math.fsum(first.rewards.values()) + math.fsum(second.rewards.values()) == pytest.approx(8.0)
    environment.reset(task_of())
    best = environment.step({"helper": Message("assistant", AUX), "main": Message("assistant", MAIN)})
    assert best.done, "full marks end it"
    assert best.rewards["main"] == 4.0


def test_a_solution_becomes_two_programs_that_keep_its_meaning() -> None:
    for own in (
        "def f(x):\n    def aux(aux): return aux + 4\n    return 3 * aux(aux=x) + 1",
        "def aux(x): return x + 4\ndef f(x): return 3 * aux(x) + 1",
        "def f(aux):\n    aux = aux + 4\n    return 3 * aux + 1",
        "def f(x):\n    from math import floor as aux\n    return 3 * aux(x + 4.5) + 1",
    ):
        parts = split_solution(own, "f")
        assert aux_use(parts[1], "f") == AuxUse(calls=True, thin=False, ignores=False), parts
        names: dict[str, Any] = {}
        exec("\n".join(parts), names)
        assert (names["f"](2), names["f"](-7)) == (19, -8)
    helper, main_part = split_solution("def f(x, y): return x + y", "f")
    assert helper == "def aux(x, y):\n    return [x + y]"
    assert main_part == "def f(x, y):\n    found = aux(x, y)\n    return found[0]"
    without_end = split_solution("def f(found):\n    if found:\n        return lambda: 1", "f")
    assert without_end[0] == "def aux(found):\n    if found:\n        return [lambda: 1]\n    return [None]"
    assert without_end[1] == "def f(found):\n    helped = aux(found)\n    return helped[0]"
    with pytest.raises(ValueError, match="does not define g"):
        split_solution("def f(x): return 1", "g")


def test_generated_tasks_are_solved_by_their_division() -> None:
    environment = CollaborativeCodingEnvironment()
    prompts = {s: {environment.tasks(s)[n].data["prompt"] for n in range(100)} for s in ("train", "validation", "test")}
    assert not prompts["train"] & prompts["test"]
    assert not prompts["train"] & prompts["validation"]
    for index in range(12):
        task = environment.tasks("test")[index]
        environment.reset(task)
        gold = environment.gold(task)
        assert gold is not None
        step = environment.step({agent: Message("assistant", replies[0]) for agent, replies in gold.items()})
        assert step.rewards == {"helper": 4.0, "main": 4.0}, gold


@pytest.mark.parametrize("options", [{}, {"turns": 2, "feedback": "level_feedback"}])
def test_the_contract_holds(options: dict[str, Any]) -> None:
    check_environment(CollaborativeCodingEnvironment(**options), tasks_per_split=2).raise_on_failure()


def test_it_is_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "collaborative_coding", "--environment.kinds", '["text"]']) == 0
    assert "8 of 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [{"turns": 0}, {"turns": 3}, {"feedback": "all"}, {"revealed_tests": -1}, {"difficulty": (0, 1)}, {"kinds": []}],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"(collaborative_coding|Environment): {next(iter(options))}"):
        CollaborativeCodingEnvironment(**options)


def test_a_task_for_a_function_of_the_helpers_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "P", "entry_point": "aux", "pairs": [[[1], 2]]}\n')
    with pytest.raises(DataError, match=r"row 1: it asks for .*'aux'"):
        CollaborativeCodingEnvironment({"train": str(path), "validation": str(path)}).tasks("train")


@pytest.mark.parametrize("path", [*files_of("humaneval", "humaneval.jsonl.gz"), *files_of("mbpp", "mbpp_sample.jsonl")])
def test_published_solutions_split_over_the_agents_earn_the_maximum(path: Path) -> None:
    environment = CollaborativeCodingEnvironment({"test": str(path)}, sandbox=Sandbox(wall_seconds=60.0))
    tasks = list(environment.tasks("test"))
    assert len(tasks) == len(rows_of(path))
    rewards = []
    for task in tasks:
        environment.reset(task)
        gold = environment.gold(task)
        assert gold is not None
        step = environment.step({agent: Message("assistant", replies[0]) for agent, replies in gold.items()})
        rewards.append(step.rewards["main"])
    assert rewards == [4.0] * len(tasks)
