"""Grades a program by tests that never enter its process: two children, and this process between them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox.host.cell import Cell, Ending
from mrlm_pl.sandbox.inside.grader import bound_names, unbound_names
from mrlm_pl.sandbox.sandbox import Sandbox, running
from mrlm_pl.sandbox.wall.isolation import IsolationName


@dataclass(frozen=True)
class Tests:
    """Tests of a program, all of them trusted code.

    Args:
        parts: code with ``assert`` statements, in parts that do not depend on each other; each assertion counts. A part
            may define ``check(candidate)``, which is then called.
        entry: name of the function that ``check`` receives.
        names: names that a program must define; empty is the entry, or the names that the tests use without
            a definition.
        context: code that the tests rely on, such as imports and helpers that the task gives; the program finds it too.
    """

    __test__ = False  # pytest takes it for tests of its own otherwise

    parts: tuple[str, ...]
    entry: str | None = None
    context: str = ""
    names: tuple[str, ...] = ()

    def required(self) -> list[str]:
        """Return names that a program must define.

        Raises:
            SyntaxError: the tests or the context are not valid Python.
        """
        if self.names or self.entry:
            return sorted({*self.names, *([self.entry] if self.entry else [])})
        return sorted({name for part in self.parts for name in unbound_names(part)} - bound_names(self.context))

    def request(self) -> dict[str, Any]:
        """Return the request to the process of the tests."""
        fields = {"context": self.context, "names": self.required(), "entry": self.entry, "tests": list(self.parts)}
        return {"operation": "grade", **fields}


@dataclass(frozen=True)
class UnitTests:
    """``unittest`` classes that test a program, trusted code; each test method counts.

    Their actions on the program's classes and objects run in its process. They see values as copies, containers that a
    call changed and files of the working folder as the program left them, and errors as the built-in class of
    their name. An object equals itself only.

    Args:
        code: code of the classes.
        names: classes and functions that the program must define.
        context: code that the tests rely on, such as imports; the program finds it too.
        operators: methods such as ``__eq__`` or ``__contains__`` that the task is to write: else the tests do not ask
            the program to compare.
    """

    code: str
    names: tuple[str, ...]
    context: str = ""
    operators: tuple[str, ...] = ()

    def required(self) -> list[str]:
        """Return names that a program must define."""
        return sorted(self.names)

    def request(self) -> dict[str, Any]:
        """Return the request to the process of the tests."""
        fields = {"context": self.context, "names": list(self.names), "tests": self.code}
        return {"operation": "grade_unit_tests", **fields, "operators": list(self.operators)}


@dataclass(frozen=True)
class Grade:
    """The result of grading a program.

    Args:
        passed: number of assertions that held, or of test methods that passed.
        run: assertions that were reached, of a part that an error ended also those that are written in it, or one more;
            or all test methods.
        loaded: whether the program was parsed and executed without an error.
        ending: reason why its process, or the tests, ended early, or None.
        fault: the first error, of the program or of a call; None without one.
        seconds: wall time in seconds.
        isolation: isolation level of the run.
    """

    passed: int
    run: int
    loaded: bool
    ending: Ending | None
    fault: str | None
    seconds: float
    isolation: IsolationName

    @property
    def share(self) -> float:
        """Share of the assertions that held; 0 when none was reached."""
        return self.passed / self.run if self.run else 0.0

    @property
    def counted(self) -> float:
        """The share; 0 for a program that could not be loaded, ended its process or took too long."""
        return self.share if self.loaded and self.ending is None else 0.0

    @property
    def solved(self) -> bool:
        """True if all tests passed, at least one was reached, and there was no failure."""
        return self.loaded and self.ending is None and 0 < self.run == self.passed


def grade(sandbox: Sandbox, program: str | None, tests: Tests | UnitTests) -> Grade:
    """Grade a program with the tests; None, for no program, passes none of them and takes no time.

    The program runs in one child and the tests in another. Calls and their results pass by value, so that the program
    can only answer calls: expected values, the tests and the verdict are out of its reach.

    Tests that break after an answer of the program, such as a value that exhausts their memory, fail the program.

    Raises:
        SandboxError: the sandbox is broken, or the tests break before the program answers a call.

    >>> sandbox = Sandbox()
    >>> tests = Tests(("assert double(2) == 4", "assert double('a') == 'aa'"))
    >>> grade(sandbox, "def double(x): return x * 2", tests).share
    1.0
    >>> grade(sandbox, "def double(x): return 4", tests).share
    0.5
    """
    if program is None:
        return Grade(0, 0, False, None, None, 0.0, sandbox.isolation)
    with running():
        started = time.monotonic()
        deadline = started + sandbox.wall_seconds
        with sandbox.open() as candidate:
            level = candidate.server.level
            load = {"operation": "load", "given": tests.context, "source": program, "required": tests.required()}
            reply = candidate.request(load, deadline)
            ending, tally = candidate.ending, dict[str, Any]()
            loaded = ending is None and "error" not in reply
            if loaded:
                with sandbox.open() as grader:
                    tally, ending = _relay(candidate, grader, tests, deadline)
    return Grade(
        int(tally.get("passed", 0)),
        int(tally.get("run", 0)),
        loaded,
        ending,
        tally.get("fault") or None if loaded else str(reply.get("error", f"ended: {ending}")),
        time.monotonic() - started,
        level,
    )


def _relay(
    candidate: Cell, grader: Cell, tests: Tests | UnitTests, deadline: float
) -> tuple[dict[str, Any], Ending | None]:
    """Pass calls of the tests to the program until the verdict is there.

    Raises:
        SandboxError: the tests broke before they received anything from the program, or the sandbox server is gone.
    """
    message, program_answered = tests.request(), False
    while True:
        reply = grader.request(message, deadline)
        if grader.ending == "time":
            return {}, "time"
        if grader.ending is not None:
            fault = f"the tests ended their own process ({grader.ending})"
            break
        if "ok" in reply:
            return reply["ok"], candidate.ending
        if "error" in reply:
            fault = f"the tests cannot be run: {reply['error']}"
            break
        message = candidate.request({"operation": "call", **reply["ask"]}, deadline)
        message.pop("gone", None)  # forged: it would end the tests, and those that are left would not count
        if candidate.ending == "time":
            return {}, "time"
        if candidate.ending is not None:
            message = {"gone": True}
        program_answered = True
    # An answer of the program may have broken the tests. If that were an error, a program could choose to have one.
    if program_answered and candidate.server.alive:
        return {"fault": fault}, candidate.ending
    raise SandboxError(fault)
