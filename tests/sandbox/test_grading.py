"""Grading: values by type, errors by class, every assertion by itself, and programs that do not play along."""

from __future__ import annotations

from typing import Any

import pytest

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Grade, Sandbox, Tests, grade
from mrlm_pl.sandbox.sandbox import running

SANDBOX = Sandbox(wall_seconds=30)


def graded(program: str, *tests: str, sandbox: Sandbox = SANDBOX, **options: Any) -> Grade:
    return grade(sandbox, program, Tests(tests, **options))


def test_all_assertions_that_hold_are_full_marks() -> None:
    found = graded("def add(a, b): return a + b", "assert add(1, 2) == 3\nassert add(a=2, b=2) == 4")
    assert (found.passed, found.run, found.share, found.solved) == (2, 2, 1.0, True)
    assert (found.loaded, found.ending, found.fault) == (True, None, None)
    assert found.isolation == SANDBOX.isolation
    assert 0 < found.seconds < 30


def test_no_program_passes_nothing() -> None:
    found = grade(SANDBOX, None, Tests(("assert True",)))
    assert (found.passed, found.run, found.counted, found.solved, found.loaded) == (0, 0, 0.0, False, False)
    assert (found.isolation, found.seconds) == (SANDBOX.isolation, 0.0)


def test_assertions_are_counted_one_by_one() -> None:
    tests = "for x in range(4):\n    assert half(x) == x / 2\nassert half(10) == 5"
    found = graded("def half(x): return x // 2", tests)
    assert (found.passed, found.run, found.share, found.solved) == (3, 5, 0.6, False)


def test_an_error_in_an_assertion_fails_it_alone() -> None:
    found = graded("def inverse(x): return 1 / x", "assert inverse(0) == 0\nassert inverse(2) == 0.5")
    assert (found.passed, found.run) == (1, 2)
    assert found.fault is not None
    assert found.fault.startswith("ZeroDivisionError: ")


def test_an_error_between_assertions_ends_its_part_alone() -> None:
    parts = ("assert inverse(1) == 1\ny = inverse(0)\nassert inverse(4) == 0.25", "assert inverse(2) == 0.5")
    found = graded("def inverse(x): return 1 / x", *parts)
    assert (found.passed, found.run) == (2, 3)


def test_parts_do_not_share_names() -> None:
    found = graded("def f(): return 1", "x = f()\nassert x == 1", "assert f() == 1\nassert x == 1", names=("f",))
    assert (found.passed, found.run) == (2, 3)


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        ("1", "f() == 1 and type(f()) is int"),
        ("True", "f() is True"),
        ("1.0", "type(f()) is float"),
        ("10**40", "f() == 10**40"),
        ("(1, [2.5, 'a'], {3})", "f() == (1, [2.5, 'a'], {3}) and type(f()[2]) is set"),
        ("{(1, 2): b'x', None: frozenset([1])}", "f() == {(1, 2): b'x', None: frozenset([1])}"),
        ("float('nan')", "f() != f() and type(f()) is float"),
        ("'\\ud800'", "f() == '\\ud800'"),
        ("1j", "f() == 1j"),
        ("None", "f() is None"),
    ],
)
def test_values_keep_their_types(value: str, holds: str) -> None:
    assert graded(f"def f(): return {value}", f"assert {holds}").solved


@pytest.mark.parametrize(
    "program",
    [
        "class Five(int): pass\ndef f(): return Five(5)",
        "class Same:\n    def __eq__(self, other): return True\ndef f(): return Same()",
        "class Text(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def f(): return Text('6')",
        "class Five(float): pass\ndef f(): return Five(5)",
        "def f(): return iter([5])",
    ],
)
def test_objects_that_resemble_a_value_are_not_it(program: str) -> None:
    found = graded(program, "assert f() == 5", "assert 5 == f()", "assert f() in (5, [5], 6)")
    assert (found.passed, found.run) == (0, 3)


def test_objects_of_the_program_are_passed_back_to_it() -> None:
    program = """
class Node:
    def __init__(self, value): self.value = value
def make(value): return Node(value)
def read(node): return node.value
def read_all(nodes): return [node.value for node in nodes['all']]
"""
    tests = "a, b = make(4), make(5)\nassert read(a) == 4\nassert read_all({'all': [b, a]}) == [5, 4]\nassert a != b"
    assert graded(program, tests).solved


def test_arguments_are_copies() -> None:
    tests = "given = [1, 2]\nassert clear(given) == 0\nassert given == [1, 2]"
    assert graded("def clear(x):\n    x.clear()\n    return len(x)", tests).solved


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        ("ValueError('odd')", "ValueError"),
        ("KeyError('k')", "LookupError"),
        ("ZeroDivisionError()", "ArithmeticError"),
        ("type('OwnError', (ValueError,), {})('own')", "Exception"),
    ],
)
def test_errors_reach_the_tests_by_class(raised: str, caught: str) -> None:
    tests = f"try:\n    f()\nexcept {caught}:\n    assert True\nelse:\n    assert False"
    assert graded(f"def f(): raise {raised}", tests).solved
    assert not graded("def f(): return 1", tests).solved


def test_an_error_of_another_class_is_not_the_expected_one() -> None:
    tests = "try:\n    f()\nexcept ValueError:\n    assert True"
    found = graded("def f(): raise TypeError('no')", tests)
    assert (found.passed, found.run, found.fault) == (0, 1, "TypeError: TypeError: no")


@pytest.mark.parametrize("raised", ["SystemExit(0)", "KeyboardInterrupt()", "GeneratorExit()", "StopIteration()"])
def test_errors_that_would_end_the_tests_are_plain_ones_there(raised: str) -> None:
    found = graded(f"def f(): raise {raised}", "assert f() == 1\nassert f() == 1")
    assert (found.passed, found.run) == (0, 2)
    assert (found.fault or "").startswith("CandidateError")


def test_a_check_function_receives_the_entry() -> None:
    tests = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6"
    assert graded("def double(x): return 2 * x", tests, entry="double").solved
    found = graded("def double(x): return 4", tests, entry="double")
    assert (found.passed, found.run) == (1, 2)


@pytest.mark.parametrize("options", [{}, {"names": ("add", "sub")}, {"entry": "sub"}])
def test_names_that_the_tests_need_are_required(options: dict[str, Any]) -> None:
    found = graded("def add(a, b): return a + b", "assert sub(add(1, 2), 2) == 1", **options)
    assert (found.loaded, found.run, found.share, found.solved) == (False, 0, 0.0, False)
    assert found.fault == "NameError: the program does not define sub"


def test_required_names() -> None:
    assert Tests(("import math\nassert area(2) == math.pi * f(2)",), context="def f(x): return x").required() == [
        "area"
    ]
    assert Tests(("assert g(1) == h(1)",), names=("g",), entry="e").required() == ["e", "g"]


def test_the_context_is_there_for_tests_and_program() -> None:
    context = "import math\ndef square(x): return x * x"
    program = "def area(r): return math.pi * square(r)"
    assert graded(program, "assert area(2) == math.pi * square(2)", context=context).solved


def test_a_program_does_not_change_the_context_of_the_tests() -> None:
    context = "def expected(x): return 2 * x"
    program = "def expected(x): return 0\ndef double(x): return 0"
    found = graded(program, "assert double(2) == expected(2)", context=context)
    assert (found.passed, found.run) == (0, 1)


def test_what_the_context_defines_is_not_what_a_program_must() -> None:
    stub = "def double(x): raise NotImplementedError"
    assert graded("def other(): pass", "assert double(1) == 2", context=stub, names=("double",)).loaded is False


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("def add(a, b) return a", "SyntaxError: "),
        ("1 / 0\ndef add(a, b): return a + b", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "ended: exit"),
    ],
)
def test_a_program_that_cannot_be_loaded(program: str, fault: str) -> None:
    found = graded(program, "assert add(1, 2) == 3")
    assert not found.loaded
    assert not found.solved
    assert (found.passed, found.run) == (0, 0)
    assert fault in (found.fault or "")


def test_a_program_that_leaves_in_a_call_fails_that_call_and_no_other_is_made() -> None:
    program = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    found = graded(program, "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3", "assert f(4) == 4")
    assert (found.passed, found.run, found.ending, found.solved) == (1, 2, "exit", False)
    assert found.loaded


def test_a_program_that_says_that_it_is_gone_ends_no_tests() -> None:
    program = "import os\ndef f(x):\n    if x > 2: os.write(4, b'{\"gone\": true}\\n')\n    return x"
    found = graded(program, *(f"assert f({x}) == {min(x, 2)}" for x in range(8)))
    assert (found.passed, found.run) == (3, 8)


def test_a_test_cannot_overlook_that_the_program_is_gone() -> None:
    tests = "try:\n    f()\nexcept Exception:\n    assert True"
    assert not graded("import os\ndef f(): os._exit(0)", tests).solved


@pytest.mark.parametrize("place", ["while True: pass\ndef f(): return 1", "def f():\n    while True: pass"])
def test_a_program_that_takes_too_long(place: str) -> None:
    found = graded(place, "assert f() == 1", sandbox=Sandbox(wall_seconds=0.5))
    assert (found.ending, found.passed, found.solved) == ("time", 0, False)
    assert 0.5 <= found.seconds < 30


def test_time_is_for_all_calls_together() -> None:
    tests = "for _ in range(100):\n    assert f() == 1"
    found = graded("import time\ndef f():\n    time.sleep(0.1)\n    return 1", tests, sandbox=Sandbox(wall_seconds=1))
    assert found.ending == "time"


def test_replies_that_are_made_up_are_answers_and_no_verdicts() -> None:
    program = 'import os\ndef f():\n    os.write(4, b\'{"ok": {"passed": 9, "run": 9}}\\n\')\n    return 1'
    found = graded(program, "assert f() == 1")
    assert (found.passed, found.run) == (0, 1)


def test_values_that_are_too_large_to_pass_on_fail_the_test_and_not_the_sandbox() -> None:
    program = "def pack(): return [0.1] * 80_000\ndef unpack(*lists): return sum(map(len, lists))"
    found = graded(program, "x = pack()\nassert unpack(x, x) == 160_000", "assert unpack([1]) == 1")
    assert (found.passed, found.run, found.ending) == (1, 2, None)
    assert "can be passed" in (found.fault or "")


def test_a_value_that_is_too_large_fails_its_call_alone() -> None:
    program = "def f(n): return 'x' * n"
    found = graded(program, "assert f(5 << 20) == 1\nassert f(2) == 'xx'", "assert len(f(3)) == 3")
    assert (found.passed, found.run, found.ending) == (2, 3, None)
    assert "4194304 can be passed" in (found.fault or "")
    parts = graded("def f(n): return [[]] * n", "assert len(f(100_001)) == 100_001", "assert f(1) == [[]]")
    assert (parts.passed, parts.run, parts.ending) == (1, 2, None)
    assert "100000 containers" in (parts.fault or "")


def test_assertions_without_the_program_count_for_nothing() -> None:
    """As many HumanEval tests end: a program that only raises would be rewarded for them."""
    lines = ("f(1) == 1", "True, 'easy'", "1 + 1 == 2", "f(2) == 2", "True")
    tests = "def check(f):\n" + "".join(f"    assert {line}\n" for line in lines)
    found = graded("def f(x): raise ValueError", tests, entry="f")
    assert (found.passed, found.run) == (0, 2)
    assert graded("def f(x): return x", tests, entry="f").solved
    ended = "def check(f):\n    assert f(1) == 1\n    x = f(2)\n    assert True\n    assert x == 2"
    found = graded("def f(x): return x if x == 1 else 1 / 0", ended, entry="f")
    assert (found.passed, found.run) == (1, 2), "an assertion behind the error is no constant either"
    caught = "try:\n    f(1)\nexcept ValueError:\n    assert True"
    assert graded("def f(x): raise ValueError", caught).solved, "after a call it says where the test got to"


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ("import os; os._exit(0)", r"ended their own process \(exit\)"),
        ("raise SystemExit(0)", "cannot be run: SystemExit"),
    ],
)
def test_tests_that_are_broken_are_no_fault_of_the_program(tests: str, told: str) -> None:
    with pytest.raises(SandboxError, match=told):
        graded("def f(): return 1", tests, names=("f",))


def test_tests_that_are_no_python_are_an_error() -> None:
    with pytest.raises(SyntaxError):
        graded("def f(): return 1", "assert f( == 1")


def test_no_assertion_is_no_success() -> None:
    found = graded("def f(): return 1", "f()")
    assert (found.run, found.share, found.solved) == (0, 0.0, False)


def test_the_tests_do_not_enter_the_program() -> None:
    """It looks for them in all texts that its objects hold."""
    program = """
import gc
def f():
    held = [item for found in gc.get_objects() if isinstance(found, dict) for item in dict.values(found)]
    held += [item for found in gc.get_objects() if isinstance(found, list) for item in found]
    return sum(isinstance(item, str) and 'assert' + ' f()' in item for item in held)
"""
    assert graded(program, "assert f() == 0").solved


def test_a_failed_grade_gives_its_place_back() -> None:
    for _ in range(20):
        with pytest.raises(SyntaxError):
            graded("def f(): return 1", "assert f( == 1")
    with running():
        pass
    assert graded("def f(): return 1", "assert f() == 1").solved
