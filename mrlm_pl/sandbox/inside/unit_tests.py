"""Runs a task's ``unittest`` classes on a program that lives in another process, and counts how many tests pass.

The tests are the data set's own code. They see the program's classes and objects as :class:`Remote` ones: actions
on these run in the program's process, values come back as copies, and comparing happens here.
"""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrlm_pl.sandbox.inside.channel import Channel
from mrlm_pl.sandbox.inside.files import Files
from mrlm_pl.sandbox.inside.grader import CandidateError, CandidateGone, describe_error, discard_output, make_error
from mrlm_pl.sandbox.inside.shared import KINDS, Shared
from mrlm_pl.sandbox.inside.values import Opaque, decode, encode

MODULE = "tests"
_COMPARED = ("__eq__", "__ne__")
_OWN = ("__init__", "__new__", "__init_subclass__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__",
        "__class_getitem__", "__del__", "__slots__", "__instancecheck__", "__hash__")  # fmt: skip


class Remote:
    """An object of the program's process. It is equal to itself only, unless the task is to write its ``__eq__``."""

    __slots__ = ("__mention", "__program")

    def __init__(self, program: _Program, mention: Opaque) -> None:
        object.__setattr__(self, "_Remote__program", program)
        object.__setattr__(self, "_Remote__mention", mention)

    def __getattr__(self, name: str) -> Any:
        return self.__program.ask("get", [self, name])

    def __setattr__(self, name: str, value: Any) -> None:
        self.__program.ask("set", [self, name, value])

    def __delattr__(self, name: str) -> None:
        self.__program.ask("delete", [self, name])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__program.ask("call", [self, *arguments], named)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self.__program.ask("is_instance", [value, self]) is True


def _forward(action: str) -> Callable[..., Any]:
    def forward(self: Remote, *arguments: Any) -> Any:
        if action in _COMPARED and not isinstance(arguments[0], Remote):
            return NotImplemented  # an expected value is not for the program to compare
        return object.__getattribute__(self, "_Remote__program").ask(action, [self, *arguments])

    return forward


_SAFE = ("__bool__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__enter__",
         "__exit__")  # fmt: skip
"""Operators that are requested from every object, as they reveal no expected value."""


class _Program:
    """The program's process, as the tests see it.

    Args:
        channel: channel on which actions are requested and answered.
        operators: methods of operators that the task asks for, and which are therefore requested from the program.
    """

    def __init__(self, channel: Channel, operators: list[str]) -> None:
        self._channel, self._files = channel, Files()
        self._shared = Shared(lambda value: encode(value, self._mention), lambda data: decode(data, self._recall))
        self._remotes: dict[int, Remote] = {}
        methods = {name: _forward(name) for name in (*_SAFE, *operators) if name not in _OWN}
        self._remote = type("Remote", (Remote,), {"__slots__": (), "__hash__": object.__hash__, **methods})

    def ask(self, action: str, arguments: Sequence[Any], named: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
        """Run an action and return its result.

        Raises:
            CandidateGone: the program's process is gone.
            Exception: the action's error, as a built-in class or :class:`CandidateError`.
        """
        values = [*arguments, *named.values()]
        message = {
            "operation": "use",
            "action": action,
            "arguments": [self._encode_argument(value) for value in arguments],
            "named": [[key, *self._encode_argument(value)] for key, value in named.items()],
            "files": self._files.changed(),
            "shared": self._shared.changed(),
        }
        self._channel.send({"ask": message}, within_limit=True)
        answer = self._channel.receive()
        if "gone" in answer:
            raise CandidateGone
        if "error" in answer:
            raise CandidateError(str(answer["error"]))
        try:
            value, error = self._read(answer["ok"], values)
        except Exception as unreadable:  # the answer is made of values that the candidate chose
            raise CandidateError(f"the answer cannot be read: {unreadable}") from unreadable
        if error is None:
            return value
        # A StopIteration of anything else would end a generator of the tests, not a test.
        raise StopIteration if action == "__next__" and answer["ok"]["raised"]["kind"] == "StopIteration" else error

    def _encode_argument(self, value: Any) -> list[Any]:
        """Return a value as data, and its number where it is a container that the program has a copy of."""
        return [encode(value, self._mention), self._shared.number_of(value)]

    def _read(self, reply: Any, sent: list[Any]) -> tuple[Any, Exception | None]:
        """Return the value of an answer, or the error; containers and files change as the program changed them."""
        for number, value in zip(reply["held"], sent, strict=True):
            if type(value) in KINDS and type(number) is int:
                self._shared.hold(number, value)
        self._files.apply(reply["files"])
        self._shared.apply(reply["shared"])
        if "raised" in reply:
            fault = reply["raised"]
            return None, make_error(str(fault["text"]), fault["kind"], decode(fault["arguments"], self._recall))
        value, number = decode(reply["value"], self._recall), reply.get("number")
        return (self._shared.hold(number, value) if type(value) in KINDS and type(number) is int else value), None

    def _mention(self, value: Any) -> Opaque:
        if isinstance(value, Remote):
            mention = object.__getattribute__(value, "_Remote__mention")
            assert isinstance(mention, Opaque)
            return mention
        raise TypeError(f"a value of type {type(value).__name__} cannot be passed to the candidate")

    def _recall(self, mention: Opaque) -> Remote:
        if mention.number not in self._remotes:
            self._remotes[mention.number] = self._remote(self, mention)
        return self._remotes[mention.number]


class _Result(unittest.TestResult):
    """Counts; keeps the first fault in words, and none of the long reports that unittest makes for readers."""

    def __init__(self) -> None:
        super().__init__()
        self.passed, self.fault = 0, ""

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.passed += 1

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.passed += 1

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.fault = self.fault or "a test passed that should fail"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.fault = self.fault or describe_error(err[1])

    addError = addFailure  # noqa: N815

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.addFailure(subtest, err)


def grade_unit_tests(channel: Channel, request: dict[str, Any]) -> dict[str, Any]:
    """Return the number of tests that passed and of all tests, and the first fault.

    Args:
        channel: channel on which actions of the program are requested and answered.
        request: ``context`` (trusted code that the tests rely on, such as imports), ``names`` (that the program
            defines), ``operators`` (methods of operators that are the task's) and ``tests`` (code with ``unittest``
            classes).
    """
    discard_output()
    # Differences of values are for readers. For values that a program made they could take endless time.
    case: Any = unittest.case
    case.difflib = types.SimpleNamespace(ndiff=lambda *_: iter(()), unified_diff=lambda *_, **__: iter(()))
    case.pprint = types.SimpleNamespace(pformat=lambda value: "")
    program, result = _Program(channel, request["operators"]), _Result()
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(compile(request["context"], "<context>", "exec"), module.__dict__)
    total = 0
    try:
        for name in request["names"]:
            module.__dict__[name] = program.ask("global", [name])
        exec(compile(request["tests"], "<tests>", "exec"), module.__dict__)
        suite = unittest.TestLoader().loadTestsFromModule(module)
        total = suite.countTestCases()
        suite.run(result)
    except (CandidateGone, CandidateError) as error:
        result.fault = result.fault or describe_error(error)
    return {"passed": result.passed, "run": max(total - len(result.skipped), 0), "fault": result.fault}
