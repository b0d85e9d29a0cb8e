from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.class_completion.environment import ClassCompletionEnvironment
from mrlm_environments.class_completion.merge import Reply, merge, read_reply, shares
from mrlm_environments.class_completion.rows import class_task, solution_parts
from mrlm_environments.code.syntax import BROKEN

from mrlm_pl.cli.main import main
from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.sandbox import Sandbox
from tests.support.environments.data_sets import files_of, rows_of

SKELETON = '''import math

class Base:
    def twice(self, x):
        return 2 * x

class Shape(Base):
    """A shape."""
    SIDES = 4
    def __init__(self, side):
        self.side = side
    @property
    def area(self):
        """side squared."""
    @area.setter
    def area(self, value):
        """Set side to the root of value."""
    @staticmethod
    def unit():
        """A shape of side 1."""
    def double(self):
        """Double side with twice, and return it."""
'''
TESTS = """import unittest

class ShapeTest(unittest.TestCase):
    def test_area(self):
        self.assertEqual(Shape(3).area, 9)
    def test_set_area(self):
        shape = Shape(1)
        shape.area = 16
        self.assertEqual(shape.side, 4)
    def test_unit(self):
        self.assertEqual(Shape.unit().side, 1)
    def test_double(self):
        self.assertEqual(Shape(5).double(), 10)
"""
AREA = """@property
def area(self): return self.side ** 2
@area.setter
def area(self, value): self.side = math.isqrt(value)
"""
UNIT = "@staticmethod\ndef unit(): return Shape(1)\n"
DOUBLE = "def double(self):\n    self.side = self.twice(self.side)\n    return self.side\n"
ROW = {"skeleton": SKELETON, "class_name": "Shape", "test": TESTS, "import_statement": ["import math"]}
METHODS = ["area", "unit", "double"]
STUBS = "def area(self): ...\ndef unit():\n    '''Later.'''\n    pass\ndef double(self): raise NotImplementedError\n"


def task_of(row: Mapping[str, Any] = ROW) -> Task:
    return Task("class_completion", "train", 0, 0, class_task(row))


def played(*replies: str, row: Mapping[str, Any] = ROW, **options: Any) -> Step:
    environment = ClassCompletionEnvironment(num_agents=len(replies), **options)
    seen = environment.reset(task_of(row))
    return environment.step(
        {
            agent: Message("assistant", text)
            for agent, text in zip(environment.agents, replies, strict=True)
            if agent in seen
        }
    )


@pytest.mark.parametrize(
    ("replies", "parts"),
    [
        ((AREA + UNIT, DOUBLE), (2, 4, 0)),  # 6, the maximum
        ((f"```python\n{AREA}```\nand\n```py\n{UNIT}```", f"```\n{DOUBLE}```"), (2, 4, 0)),
        ((AREA + UNIT + DOUBLE,), (2, 4, 0)),
        ((AREA, UNIT, DOUBLE), (2, 4, 0)),
        ((UNIT, DOUBLE), (4 / 3, 2, 0)),  # two of three methods; two of four tests
        ((AREA + UNIT, DOUBLE.replace("self.twice", "int")), (2, 3, 0)),
        ((AREA + UNIT + DOUBLE, AREA + DOUBLE), (2, 4, -2 / 3)),  # two of three are written twice
        ((STUBS, STUBS), (0, 0, -1)),  # the least: nothing written, everything defined twice
        ((STUBS + AREA, UNIT + DOUBLE), (2, 4, -2 / 3)),  # stubs do not hide methods
        (("x = 1", ""), (0, 0, 0)),
        ((AREA + UNIT, "def double(self) return 1"), (0, 0, 0)),  # does not compile
        ((AREA + UNIT, "I do not know."), (0, 0, 0)),
        ((AREA + UNIT, "def double(self):\n    return 1\n    break"), (0, 0, 0)),  # parses, but does not compile
        ((AREA + UNIT, f"{DOUBLE}\nraise ValueError"), (2, 4, 0)),  # other statements than definitions are left out
        ((AREA + UNIT, f"{DOUBLE}\ny = 1 / 0"), (2, 0, 0)),  # does not load
    ],
    ids=range(15),
)
def test_the_score(replies: Sequence[str], parts: tuple[float, float, float]) -> None:
    step = played(*replies)
    for agent in step.rewards:
        assert step.components[agent] == pytest.approx(dict(zip(("methods", "tests", "overlap"), parts, strict=True)))
        assert step.rewards[agent] == pytest.approx(sum(parts))
    assert len(step.rewards) == len(replies)
    assert step.success is (parts[:2] == (2, 4))
    assert step.done


DISHONEST = [
    "import sys\ndef double(self): sys.exit(0)",
    "import os\ndef double(self): os._exit(0)",
    "import os\nNOTHING = os._exit(0)\ndef double(self): return 1",
    "import unittest\nunittest.TestCase.run = lambda *a, **k: None\ndef double(self): return 1",
    "import unittest\nclass Fake(unittest.TestCase):\n    def test(self): pass\ndef double(self): print('OK')",
    "class Yes(int):\n    def __eq__(self, other): return True\ndef double(self): return Yes()",
    "OWN = type('UnicodeDecodeError', (Exception,), {'__str__': lambda e: 'odd'})\n"
    "def double(self): raise OWN('utf-8', b'x', -2**62, 1 - 2**62, 'r')",
    "def double(self): print('x' * (17 << 20))",
    "import builtins\nbuiltins.AssertionError = type('Fine', (BaseException,), {})\ndef double(self): return 1",
]


@pytest.mark.parametrize("reply", DISHONEST, ids=range(len(DISHONEST)))
def test_nothing_fakes_a_pass(reply: str) -> None:
    step = played(AREA + UNIT, reply)
    assert step.success is False
    assert step.components["agent_0"]["tests"] <= 3.0


def test_a_method_without_end_passes_no_test() -> None:
    step = played(AREA + UNIT, "def double(self):\n    while True: pass", sandbox=Sandbox(wall_seconds=0.8))
    assert step.components["agent_1"] == {"methods": 2.0, "tests": 0.0, "overlap": 0.0}


def merged(*texts: str) -> str:
    replies = [read_reply(text, "Shape", METHODS) for text in texts]
    return merge(SKELETON, "Shape", METHODS, replies).source


def test_merging_keeps_what_the_skeleton_has() -> None:
    source = merged(
        "def unit(): return Shape(1)", f"class Shape:\n{''.join(f'    {line}' for line in AREA.splitlines(True))}"
    )
    tree = ast.parse(source)
    (shape,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Shape"]
    assert [ast.unparse(base) for base in shape.bases] == ["Base"]
    decorators = {
        (node.name, len(node.args.args)): [ast.unparse(decorator) for decorator in node.decorator_list]
        for node in shape.body
        if isinstance(node, ast.FunctionDef)
    }
    assert decorators == {
        ("__init__", 2): [], ("area", 1): ["property"], ("area", 2): ["area.setter"], ("unit", 0): ["staticmethod"],
        ("double", 1): [],
    }  # fmt: skip
    assert source.startswith("import math")
    assert "A shape." in source
    assert "SIDES = 4" in source


def test_merging_takes_what_agents_add() -> None:
    source = merged(
        "from __future__ import annotations\nimport json\nRATE = 3\ndef free(x): return x\n"
        "shape = Shape(2)\nprint(shape)\n"
        "if __name__ == '__main__':\n    free(1)\n"
        "class Mixin: pass\nclass Shape(Mixin):\n    EXTRA = 1\n    SIDES = 9\n    def __init__(self): pass\n"
        "    @property\n    def own(self): return 1\n    def double(self): return 1",
        "import json\nRATE = 4\n@staticmethod\ndef double(self): return 2",
    )
    lines = source.split("\n")
    assert lines[:3] == ["from __future__ import annotations", "import math", "import json"]
    assert source.count("import json") == 1
    assert "RATE = 3" in source
    assert "RATE = 4" not in source
    assert "class Shape(Base, Mixin):" in source
    assert "EXTRA = 1" in source
    assert "SIDES = 9" not in source, "the skeleton's own stay"
    assert "def __init__(self, side):" in source
    assert "def __init__(self):" not in source
    assert "def own(self):" in source
    assert "shape = Shape(2)" not in source, "an example of use would run too early"
    assert "__main__" not in source
    assert "return 2\n" not in f"{source}\n", "the earlier agent's method counts"


def test_the_later_definition_of_one_agent_counts() -> None:
    assert "return 2" in merged("def double(self): return 1\ndef double(self): return 2")
    assert "return 2" in merged("```\ndef double(self): return 1\n```\n```\n    def double(self): return 2\n```")


@pytest.mark.parametrize(
    ("count", "agents", "sizes"), [(5, 2, [3, 2]), (5, 3, [2, 2, 1]), (2, 3, [1, 1]), (1, 4, [1]), (6, 1, [6])]
)
def test_every_agent_has_work(count: int, agents: int, sizes: list[int]) -> None:
    methods = [f"m{number}" for number in range(count)]
    divided = shares(methods, agents)
    assert [len(part) for part in divided] == sizes
    assert [method for part in divided for method in part] == methods


def test_who_acts_and_what_they_see() -> None:
    environment = ClassCompletionEnvironment(num_agents=2, system_prompt="Be brief.")
    seen = environment.reset(task_of())
    assert [message.role for message in seen["agent_1"]] == ["system", "user"]
    assert SKELETON.strip() in seen["agent_0"][1].content
    assert "write area, unit. Others write double at" in seen["agent_0"][1].content
    assert "write double. Others write area, unit at" in seen["agent_1"][1].content
    environment = ClassCompletionEnvironment(num_agents=5)
    assert environment.agents == ("agent_0", "agent_1", "agent_2", "agent_3", "agent_4")
    assert list(environment.reset(task_of())) == ["agent_0", "agent_1", "agent_2"]
    one = ClassCompletionEnvironment(num_agents=3, methods=(1, 1))
    task = one.tasks("train")[0]
    assert list(one.reset(task)) == ["agent_0"]
    gold = one.gold(task)
    assert gold is not None
    assert one.step({"agent_0": Message("assistant", gold["agent_0"][0])}).rewards == {"agent_0": 6.0}


def test_the_solution_is_divided_with_all_that_it_needs() -> None:
    done = SKELETON.replace('"""Double side with twice, and return it."""', "return 1")
    solution = f"RATE = 2\ndef free(x): return x\n{done}"
    data = {**task_of().data, "solution": solution}
    first, second = solution_parts(data, [["area", "unit"], ["double"]])
    assert "RATE = 2" in first
    assert "def free" in first
    assert "SIDES = 4" in first
    assert "def double" not in first
    assert second == "import math\n\nclass Shape(Base):\n\n    def double(self):\n        return 1"


def test_monstrous_replies_are_no_programs() -> None:
    for text in ("(" * 9000, "-" * 40000 + "1", "x" + ".a" * 20000, "1" + "+1" * 20000, "\0", "\ud800", "9" * 40000):
        with suppress(*BROKEN):
            found = read_reply(f"def double(self): return {text}", "Shape", METHODS)
            merge(SKELETON, "Shape", METHODS, [found])
            assert text == "\ud800"
    assert read_reply("", "Shape", METHODS) == Reply()


def test_published_skeletons_with_faults_are_put_together_again() -> None:
    info = [
        {"method_name": "double", "method_description": 'def double(self):\n        """\n        Twice.\n        '},
        {"method_name": "half", "method_description": 'def half(self):\n    """Half."""'},
    ]
    head = "class Shape:\n    def __init__(self, side):\n        self.side = side\n"
    for broken in (f"'''\n{head}'''", f'{head}    def double(self):\n        """'):
        data = task_of({**ROW, "skeleton": broken, "class_constructor": head, "methods_info": info}).data
        tree = ast.parse(data["skeleton"]).body
        assert isinstance(tree[-1], ast.ClassDef)
        assert [node.name for node in tree[-1].body if isinstance(node, ast.FunctionDef)] == [
            "__init__",
            "double",
            "half",
        ]
        assert data["methods"] == ["double", "half"]
    with pytest.raises(IndentationError):
        task_of({**ROW, "skeleton": "class Shape:"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"class_name": "Form"}, "no class Form"),
        ({"test": "import unittest"}, "no test method"),
        ({"test": "def f("}, "SyntaxError"),
        ({"methods_info": [{"method_name": "nothing"}]}, "of the name nothing"),
        ({"skeleton": "class Shape:\n    def f(self): return 1"}, "no method to write"),
        ({"solution_code": "class Form: pass"}, "no class Shape"),
    ],
)
def test_bad_rows_are_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps([{**ROW, **change}]))
    with pytest.raises(DataError, match=r"my\.json, row 1: .*a row is {skeleton, class_name, test}") as caught:
        ClassCompletionEnvironment(data={"test": str(path)}).tasks("test")
    assert told in str(caught.value)


def test_rows_that_need_other_modules_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needy = {**ROW, "import_statement": ["import pandas as pd"]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW, needy, {**ROW, "class_name": "Form"}]))
    assert ClassCompletionEnvironment(data={"test": str(path)}).tasks("test").size == 1
    assert "skipped 2 of 3 rows" in caplog.text
    assert "row 2: ValueError: the class Shape needs pandas" in caplog.text
    assert "row 3: ValueError: there is no class Form" in caplog.text
    assert class_task(needy, packages=("pandas",))["class"] == "Shape"


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_generated_classes_are_solved_by_their_division(agents: int) -> None:
    environment = ClassCompletionEnvironment(num_agents=agents, methods=(1, 8))
    for index in range(5):
        task = environment.tasks("test")[index]
        seen = environment.reset(task)
        gold = environment.gold(task)
        assert gold is not None
        step = environment.step({agent: Message("assistant", gold[agent][0]) for agent in seen})
        assert step.rewards == dict.fromkeys(seen, 6.0), gold


def test_splits_share_no_class() -> None:
    environment = ClassCompletionEnvironment()
    posed = {s: {environment.tasks(s)[n].data["skeleton"] for n in range(80)} for s in ("train", "validation", "test")}
    assert not posed["train"] & posed["test"]
    assert not posed["train"] & posed["validation"]


@pytest.mark.parametrize("agents", [1, 3])
def test_the_contract_holds(agents: int) -> None:
    check_environment(ClassCompletionEnvironment(num_agents=agents), tasks_per_split=2).raise_on_failure()


def test_it_is_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "class_completion", "--environment.methods", "[2, 2]"]) == 0
    assert "8 of 8" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"num_agents": 0}, {"methods": (0, 2)}, {"methods": (2, 9)}, {"methods": (2,)}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ClassCompletionEnvironment(**options)


BY_DATE = {"CalendarUtil", "Chat"}
"""The first fails one of its own tests, which compares today's events with a date of January 2024; the second compares
times to the second, and fails when one ends in between."""


@pytest.mark.parametrize("path", files_of("classeval", "classeval_sample.json"))
@pytest.mark.parametrize(
    "agents", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_published_solutions_split_over_agents_earn_six(
    agents: int, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = ClassCompletionEnvironment(agents, {"test": str(path)})
    tasks = list(environment.tasks("test"))
    rows = len(rows_of(path))
    assert len(tasks) == rows - 1
    assert f"skipped 1 of {rows} rows" in caplog.text
    assert "the class DatabaseProcessor needs pandas" in caplog.text
    rewards = {}
    for task in tasks:
        seen = environment.reset(task)
        gold = environment.gold(task)
        assert gold is not None
        step = environment.step({agent: Message("assistant", gold[agent][0]) for agent in seen})
        rewards[task.data["class"]] = step.rewards["agent_0"]
    assert {name for name, reward in rewards.items() if reward != 6.0} <= BY_DATE, rewards
