"""Programs whose answers attack the process of the tests: always a failed program, never an error."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Sandbox, Tests, UnitTests, grade
from mrlm_pl.sandbox.inside.grader import describe_error, make_error

SANDBOX = Sandbox(wall_seconds=2)
CHECK = """
def check(candidate):
    for _ in range(9):
        print(candidate(1))
    assert candidate(1) == "never"
    assert repr(candidate(2)) == "never"
"""
CLASSES = """
import sys, unittest
class ValueTest(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(Box().value(1), "never")
    def test_error(self):
        with self.assertRaises(KeyError) as caught:
            Box().value(1)
        self.assertEqual(str(caught.exception) + repr(caught.exception), "never")
"""


def own_error(kind: str, *arguments: object) -> str:
    """Raise an error of an own class with the name of a built-in one."""
    return f"raise type({kind!r}, (Exception,), {{'__str__': lambda error: 'odd'}})(*{arguments!r})"


def written(reply: str) -> str:
    """Write a reply that is none."""
    return f"import os; os.write(4, {reply.encode()!r} + b'\\n')"


ERRORS = {
    "decoding far outside": own_error("UnicodeDecodeError", "utf-8", b"x", -(2**62), -(2**62) + 1, "r"),
    "decoding beyond a machine word": own_error("UnicodeDecodeError", "utf-8", b"x", 2**70, 2**70 + 1, "r"),
    "encoding far outside": own_error("UnicodeEncodeError", "utf-8", "x", -(2**62), -(2**62) + 1, "r"),
    "translating far outside": own_error("UnicodeTranslateError", "x", -(2**62), -(2**62) + 1, "r"),
    "a group of no errors": own_error("ExceptionGroup", "m", [5]),
    "a place in no file": own_error("SyntaxError", "m", ("f", 2**70, -(2**70), "t", 5, 2**62)),
    "numbers of the system": own_error("OSError", 2**70, "\ud800", "\ud800", 5, "\ud800"),
    "a class without a sound name": own_error("\ud800", 1),
    "a text that raises": "raise type('E', (ValueError,), {'__str__': lambda error: 1 / 0})()",
    "a text that leaves": "raise type('E', (ValueError,), {'__str__': lambda error: __import__('os')._exit(0)})()",
    "arguments that cannot be shown": "raise ValueError(type('R', (), {'__repr__': lambda r: 1 / 0})())",
    "a huge text": "raise ValueError('x' * (5 << 20))",
    "a doubling argument": "exec('x = 1\\nfor _ in range(16): x = [x, x]\\nraise KeyError(x)')",
    "leaving at exit": "import atexit, os; atexit.register(os._exit, 0); raise SystemExit",
    "interrupting": "raise KeyboardInterrupt",
}
ANSWERS = {
    "printed without end by the tests": "return '\\ud800' * 1_000_000",
    "an own flood": "import os; [os.write(1, b'x' * (1 << 20)) for _ in range(20)]",
    "lists in lists": written('{"ok": ' + "[" * 900 + "]" * 900 + "}"),
    "objects in objects": written('{"ok": ' * 900 + "1" + "}" * 900),
    "no number": written('{"ok": {"timedelta": [1e308, NaN, Infinity]}}'),
    "an integer of a megabyte": "return 16 ** 1_000_000",
    "an answer without an answer": written("{}"),
    "a question instead of an answer": written('{"ask": {"operation": "load"}}'),
    "an error that is not a text": written('{"error": {"a": 1}, "kind": ["ValueError"]}'),
    "a verdict": written('{"ok": {"passed": 9, "run": 9, "held": [], "files": {}, "shared": [], "value": 1}}'),
    "a file by a name of half a letter": "open('\\udc80', 'w').write('x'); return 1",
    "a file instead of a module": "open('traceback.py', 'w').write('raise SystemExit'); raise ValueError",
    "no channel": "import os; os.closerange(0, 64)",
    "a silent channel": "import os, time; os.close(4); time.sleep(9)",
    "no memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (0, 0)); return [0] * 9999",
    "a crash": "import ctypes; ctypes.string_at(0)",
}


def programs(deeds: Mapping[str, str]) -> list[object]:
    return [pytest.param(code, id=name) for name, code in deeds.items()]


@pytest.mark.parametrize("deed", programs({**ERRORS, **ANSWERS}))
def test_whatever_is_answered_fails_the_program(deed: str) -> None:
    function = f"def f(x):\n    {deed}"
    class_ = f"class Box:\n    def value(self, x):\n        {deed}"
    for program, tests in ((function, Tests((CHECK,), "f")), (class_, UnitTests(CLASSES, ("Box",)))):
        found = grade(SANDBOX, program, tests)
        assert (found.loaded, found.passed, found.solved) == (True, 0, False)


@pytest.mark.parametrize("way", ["os._exit(3)", "raise SystemExit", "import ctypes; ctypes.string_at(0)"])
def test_tests_that_an_answer_breaks_fail_the_program(way: str) -> None:
    """As an answer that crashes or exhausts their process would, for an unforeseen reason."""
    breaks = f"import os\nif f() == 1:\n    {way}\nassert f() == 2"
    found = grade(SANDBOX, "def f(): return 1", Tests((breaks,), names=("f",)))
    assert (found.loaded, found.passed, found.solved) == (True, 0, False)
    assert found.fault
    assert grade(SANDBOX, "def f(): return 2", Tests((breaks,), names=("f",))).solved
    with pytest.raises(SandboxError, match="tests"):
        grade(SANDBOX, "def f(): return 1", Tests(("raise SystemExit",), names=("f",)))


def test_an_error_of_a_code_has_the_words_of_the_program_s_error() -> None:
    caught = "try:\n    f(b'\\xff')\n    told = ''\nexcept UnicodeDecodeError as error:\n    told = str(error)\n"
    tests = Tests((f"{caught}assert 'invalid start byte' in told", "f(b'\\xff')"), names=("f",))
    found = grade(SANDBOX, "def f(text): return text.decode()", tests)
    assert found.passed == 1
    assert found.fault == "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"


@pytest.mark.parametrize("kind", ["UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError"])
def test_errors_of_codes_keep_class_and_arguments_and_can_be_shown(kind: str) -> None:
    arguments = ["utf-8", "x", -(2**62), -(2**62) + 1, "r"]
    error = make_error("text", kind, arguments)
    assert type(error).__name__ == kind
    assert list(error.args) == arguments
    assert describe_error(error).startswith(kind)


def test_an_error_without_words_is_its_class() -> None:
    class MuteError(ValueError):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(MuteError()) == "MuteError"
    assert describe_error(ValueError("x" * 9999)) == "ValueError: " + "x" * 488
