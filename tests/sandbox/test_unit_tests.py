"""Grading by ``unittest`` classes: what tests see of a program's objects, and that a program cannot fake a pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.sandbox import Grade, Sandbox, UnitTests, grade
from mrlm_pl.sandbox.inside.files import Files
from mrlm_pl.sandbox.inside.shared import MAX_CONTAINERS, Shared

BOX = """
import collections
import datetime
from xml.etree import ElementTree
class Box:
    kind = 'box'
    def __init__(self, items=None):
        self.items = items or []
        self.by_name = {'a': {'n': 1}}
        self.day = datetime.date(2024, 2, 29)
    def add(self, item):
        self.items.append(item)
        return len(self.items)
    def total(self): return sum(self.items)
    def itself(self): return self
    def other(self): return Box([9])
    def each(self):
        yield from self.items
    def fill(self, target, *, word='w'): target['word'] = word
    def fail(self): raise ValueError('no', 3)
    @staticmethod
    def later(day): return day + datetime.timedelta(days=1)
    @property
    def size(self): return len(self.items)
    @size.setter
    def size(self, value): self.items = [0] * value
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def __eq__(self, other): return isinstance(other, Box) and self.items == other.items
    def __contains__(self, item): return item in self.items
    def __add__(self, other): return Box(self.items + other.items)
    def line(self): return collections.deque(self.items, 3)
    def hang(self, element): element.append(ElementTree.Element('leaf', n='1')); return element
    def save(self, name):
        with open(name, 'w') as file: file.write(str(self.total()))
    def load(self, name):
        with open(name) as file: return file.read()
    def is_of(self, kind): return isinstance(self.items, kind)
"""


def made_tests(*lines: str) -> UnitTests:
    """One test method for each group of lines, in which ``eq`` and ``raises`` are short for assertions."""
    lines = tuple(group.replace("eq(", "self.assertEqual(").replace("raises(", "self.assertRaises(") for group in lines)
    methods = [
        f"    def test_{n}(self):\n" + "".join(f"        {line}\n" for line in group.split("\n"))
        for n, group in enumerate(lines)
    ]
    return UnitTests("import unittest\nclass BoxTest(unittest.TestCase):\n" + "".join(methods), ("Box",))


def graded(program: str, *lines: str, operators: tuple[str, ...] = (), **options: Any) -> Grade:
    made = made_tests(*lines)
    return grade(Sandbox(**options), program, UnitTests(made.code, made.names, "import datetime", operators))


HONEST = [
    "box = Box([1, 2])\neq(box.add(3), 3)\neq(box.total(), 6)\neq(box.size, 3)",
    "box = Box()\nbox.size = 2\neq(box.items, [0, 0])\neq(len(box), 2)\nself.assertTrue(box)",
    "box = Box([5])\nself.assertIs(box.itself(), box)\nself.assertIsInstance(box, Box)\neq(isinstance(3, Box), False)",
    "eq(Box().other().total(), 9)\neq(Box.kind, 'box')",
    "eq(list(Box([4, 5]).each()), [4, 5])\neq([n for n in Box([7])], [7])",
    "eq(Box.later(datetime.date(2024, 2, 28)), Box().day)\neq(Box().day.year, 2024)",
    "with raises(ValueError) as found:\n    Box().fail()\neq(found.exception.args, ('no', 3))",
    "box = Box()\ndel box.day\nself.assertFalse(hasattr(box, 'day'))\nself.assertFalse(hasattr(box, 'nothing'))",
    "target = {}\nBox().fill(target, word='x')\neq(target, {'word': 'x'})",
    "box = Box()\nbox.by_name['a']['n'] = 2\neq(box.by_name, {'a': {'n': 2}})",
    "mine = [1]\nbox = Box(mine)\nmine.append(2)\neq(box.total(), 3)\nbox.add(4)\neq(mine, [1, 2, 4])",
    "items = Box([1]).items\neq(items, [1])",
    "box = Box([1])\nitems = box.items\nbox.add(2)\neq(items, [1, 2])\nself.assertIs(items, box.items)",
    "self.assertTrue(Box().is_of(list))",
    "from collections import deque\neq(Box([1, 2]).line(), deque([1, 2]))\neq(Box().line().maxlen, 3)",
    "from collections import deque\nbox = Box(deque([1, 2]))\nitems = box.items\nbox.items.append(3)\n"
    "eq(box.total(), 6)\nbox.add(4)\neq(items, deque([1, 2, 3, 4]))\neq(items.popleft(), 1)\neq(box.total(), 9)",
    "from xml.etree import ElementTree\nroot = ElementTree.fromstring('<a><b>x</b></a>')\n"
    "found = Box().hang(root)\nself.assertIsInstance(found, ElementTree.Element)\n"
    "eq([inner.tag for inner in found], ['b', 'leaf'])\n"
    "box = Box()\nbox.day = root[0]\neq(box.day.text, 'x')",
    "import os\nwith open('fixed', 'w') as file:\n    file.write('x')\nos.chmod('fixed', 0o444)\n"
    "with raises(PermissionError):\n    Box([3]).save('fixed')\nos.chmod('fixed', 0o644)\nBox([3]).save('fixed')\n"
    "with open('fixed') as file:\n    eq(file.read(), '3')\nos.chmod('fixed', 0)\n"
    "with raises(PermissionError):\n    Box().load('fixed')\nos.remove('fixed')",
    "Box([3]).save('f.txt')\nwith open('f.txt') as file:\n    eq(file.read(), '3')",
    "import os\nos.makedirs('d')\nwith open('d/g.txt', 'w') as file:\n    file.write('hi')\n"
    "eq(Box().load('d/g.txt'), 'hi')\n"
    "os.remove('d/g.txt')\nwith raises(FileNotFoundError):\n    Box().load('d/g.txt')",
]  # fmt: skip


def test_tests_use_objects_as_if_they_were_their_own() -> None:
    found = graded(BOX, *HONEST)
    assert (found.passed, found.run, found.fault) == (20, 20, None)
    assert found.solved


def test_the_same_tests_pass_without_a_sandbox(tmp_path: Path) -> None:
    """So that they demand nothing of the sandbox that Python does not do."""
    (tmp_path / "t.py").write_text(f"{BOX}\n{made_tests(*HONEST).code}")
    command = [sys.executable, "-m", "unittest", "t"]
    if os.geteuid() == 0:  # who may read what modes forbid, unless without rights
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Ran 20 tests" in done.stderr
    assert done.returncode == 0, done.stderr


def test_each_test_method_counts() -> None:
    found = graded(BOX, "self.assertEqual(1, 1)", "self.assertEqual(Box([1]).total(), 2)", "Box().nothing()")
    assert (found.passed, found.run) == (1, 3)
    assert found.share == 1 / 3
    assert found.fault is not None
    assert "1 != 2" in found.fault
    skipped = graded(BOX, "self.skipTest('not here')", "self.assertEqual(Box([1]).total(), 1)")
    assert (skipped.passed, skipped.run) == (1, 1)


def test_operators_are_the_programs_only_where_the_task_is_to_write_them() -> None:
    same = "self.assertEqual(Box([1]), Box([1]))"
    summed = "self.assertEqual((Box([1]) + Box([2])).total(), 3)"
    within = "self.assertIn(1, Box([1]))"
    assert graded(BOX, same, summed).passed == 0
    assert graded(BOX, same, summed, within, operators=("__eq__", "__add__", "__contains__")).passed == 3
    always = "class Box:\n    def __init__(self, items): pass\n    def __eq__(self, other): return True\n"
    literal = "self.assertEqual(Box([1]), 5)\n"
    assert graded(always, literal, operators=("__eq__",)).passed == 0, "an expected value is not compared there"


LYING = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __contains__(self, item): return True
    def __hash__(self): return 0
    def __getattr__(self, name): return self
    def __call__(self, *given): return self
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __bool__(self): return True
    def __float__(self): return 5.0
    def __index__(self): return 5
    def __round__(self, digits=0): return self
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __str__(self): return '5'
class Box(Yes):
    def __init__(self, items=None): pass
    def value(self): return Yes()
"""
DISHONEST = {
    "a method exits": "import sys\nclass Box:\n    def value(self): sys.exit(0)",
    "a method leaves": "import os\nclass Box:\n    def value(self): os._exit(0)",
    "it leaves at the start": "import os\nclass Box: pass\nos._exit(0)",
    "it exits at the start": "import sys\nclass Box: pass\nsys.exit(0)",
    "a verdict is printed": 'print(\'{"ok": {"passed": 4, "run": 4}}\')\nclass Box:\n'
    "    def value(self):\n        print('OK\\n4 passed')\n        return None",
    "unittest is patched": "import unittest, unittest.case\n"
    "for name in dir(unittest.TestCase):\n"
    "    if name.startswith('assert'): setattr(unittest.TestCase, name, lambda *a, **k: None)\n"
    "unittest.TestCase.run = unittest.TestResult.wasSuccessful = lambda *a, **k: True\n"
    "unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *a, **k: None\n"
    "class Box:\n    def value(self): return None",
    "objects that equal everything": LYING,
    "the channel is forged": "import os\nfor n in range(3, 64):\n"
    '    try: os.write(n, b\'{"ok": {"passed": 4, "run": 4, "gone": false, "fault": ""}}\\n\' * 9)\n'
    "    except OSError: pass\nclass Box:\n    def value(self): return None",
    "the encoder is patched": "import sys, json\n"
    "for module in list(sys.modules.values()):\n"
    "    for name in ('encode', 'decode', 'grade_unit_tests', 'Program', 'Shared', 'Files'):\n"
    "        if hasattr(module, name): setattr(module, name, lambda *a, **k: {'passed': 4, 'run': 4})\n"
    "class Box:\n    def value(self): return None",
    "assertions of its own": "class Box:\n    def value(self):\n"
    "        import unittest\n        raise unittest.SkipTest('no')",
    "files of modules": "class Box:\n    def value(self):\n"
    "        for name in ('unittest', 'datetime', 'math', 'sitecustomize'):\n"
    "            with open(name + '.py', 'w') as file: file.write('class TestCase: pass')\n",
}
ASKED = ("eq(Box().value(), 5)", "self.assertTrue(Box().value() == 5)", "self.assertIn(5, [Box().value()])",
         "self.assertGreater(Box().value(), 4)", "self.assertAlmostEqual(Box().value(), 5)", "import math\n"
         "eq(math.sqrt(25), Box().value())", "self.assertIn(5, Box().value())")  # fmt: skip


@pytest.mark.parametrize("program", DISHONEST.values(), ids=DISHONEST.keys())
def test_nothing_fakes_a_pass(program: str) -> None:
    found = graded(program, *ASKED)
    assert found.passed == 0
    assert not found.solved


def test_leaving_after_right_answers_is_told_and_counts_all_tests() -> None:
    leaving = "import os\ncalls = []\nclass Box:\n    def value(self):\n        calls.append(1)\n"
    leaving += "        if len(calls) > 2: os._exit(0)\n        return 5"
    found = graded(leaving, *["self.assertEqual(Box().value(), 5)"] * 4)
    assert (found.passed, found.run, found.ending, found.solved) == (2, 4, "exit", False)


def test_an_endless_method_is_ended() -> None:
    found = graded("class Box:\n    def value(self):\n        while True: pass", ASKED[0], wall_seconds=0.7)
    assert (found.passed, found.ending) == (0, "time")


@pytest.mark.parametrize(
    "value",
    ["'x' * 1_000_000", "[[n] for n in range(60_000)]", "'a\\n' * 400_000", "{n: str(n) for n in range(40_000)}"],
)
def test_huge_values_are_a_failure_and_no_fault_of_the_sandbox(value: str) -> None:
    program = f"class Box:\n    def value(self): return {value}"
    found = graded(program, "self.assertEqual(Box().value(), [1])", "self.assertEqual(Box().value(), 'b\\n')")
    assert found.passed == 0


def test_files_stay_in_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    files = Files(str(inside))
    for path in ("../out", "/tmp/out", "a/../../out", "", "a//b", "./a", "a/" * 9 + "b"):
        with pytest.raises(ValueError, match="not a path"):
            files.apply({path: ["00", 0o644]})
    for bad in ({"a": ["zz", 0]}, {"a": ["00" * (2 << 20), 0]}, {"\0": ["00", 0]}, {"a": ["00", "x"]}):
        with pytest.raises((ValueError, TypeError)):
            files.apply(bad)
    with pytest.raises(ValueError, match="64 files"):
        files.apply({f"f{n}": ["00", 0o600] for n in range(65)})
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def test_files_of_two_folders_become_equal(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    here, there = (Files(str(folder)) for folder in folders)
    (folders[0] / "x").write_bytes(b"one")
    (folders[0] / "db-journal").write_bytes(b"private")
    changes = here.changed()
    assert changes == {"x": [b"one".hex(), 0o644]}
    there.apply(changes)
    assert there.changed() == {}, "what came from elsewhere is no change of its own"
    opened = (folders[1] / "x").open("rb")
    (folders[0] / "x").write_bytes(b"two")
    there.apply(here.changed())
    assert opened.read() == b"two", "written in place"
    (folders[0] / "x").unlink()
    there.apply(here.changed())
    assert not (folders[1] / "x").exists()
    assert here.changed() == {}


def test_shared_containers_are_bounded() -> None:
    shared = Shared(lambda value: list(value), lambda data: list(data))
    lists: list[list[int]] = [[n] for n in range(MAX_CONTAINERS + 1)]
    for number, container in enumerate(lists):
        shared.hold(number, container)
    for container in lists:
        container.append(0)
    assert [number for number, _ in shared.changed()] == list(range(1, MAX_CONTAINERS + 1))
    assert shared.changed() == []
    shared.apply([[5, [1, 2]], [0, [1, 2]]])
    assert (lists[5], lists[0]) == ([1, 2], [0, 0])
