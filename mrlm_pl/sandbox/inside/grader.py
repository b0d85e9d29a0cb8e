"""Runs a task's tests on a candidate that lives in another process, and counts how many hold.

The tests are the data set's own code. They see the candidate as functions that pass arguments and results by value, so
they can neither meet an object of its making nor be reached from it.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Iterable, Sequence
from typing import Any

from mrlm_pl.sandbox.inside.channel import Channel
from mrlm_pl.sandbox.inside.values import Opaque, decode, encode

_RECORD, _CONSTANT, _FAILED, _ERROR = "__record_test", "__record_constant", "__failed_test", "__test_error"
MAX_TESTS = 100_000
MAX_FAULT_CHARACTERS = 500


class CandidateGone(BaseException):
    """The candidate's process is gone: no further call can be answered. No test may catch it."""


class CandidateError(Exception):
    """The candidate raised an error in a call."""


def grade(channel: Channel, request: dict[str, Any]) -> dict[str, Any]:
    """Return the number of tests that passed and that were run, and the first fault.

    Args:
        channel: channel on which calls of the candidate are requested and answered.
        request: ``context`` (trusted code that the tests rely on, such as helpers given in the prompt), ``names`` (what
            the candidate defines), ``tests`` (code, in parts that are independent of each other) and ``entry`` (name
            of the function that a ``check`` function receives, or None).
    """
    discard_output()
    tally: dict[str, Any] = {"passed": 0, "run": 0, "fault": ""}
    for part in request["tests"]:
        run_before = tally["run"]
        try:
            _run(channel, request, part, tally)
        except CandidateGone:
            tally["run"] += 1
            break
        except Exception as error:  # of the tests, which may raise anything
            # Assertions behind the error count, else one error after the first success would be rewarded.
            asserts = [node for node in ast.walk(ast.parse(part)) if isinstance(node, ast.Assert)]
            tally["run"] = max(tally["run"] + 1, run_before + sum(not _is_constant(node) for node in asserts))
            tally["fault"] = tally["fault"] or describe_error(error)
    return tally


def discard_output() -> None:
    """Send everything that this process prints to ``/dev/null``: tests may print values without end."""
    dev_null = os.open("/dev/null", os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(dev_null, descriptor)
    os.close(dev_null)


def describe_error(error: BaseException) -> str:
    """Return an error's class and text, at most ``MAX_FAULT_CHARACTERS``; the class alone if it has no text.

    >>> describe_error(ValueError("odd"))
    'ValueError: odd'
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the text is made of arguments that the candidate chose
        text = type(error).__name__
    return text[:MAX_FAULT_CHARACTERS]


def _run(channel: Channel, request: dict[str, Any], part: str, tally: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(request["context"], "<context>", "exec"), namespace)

    calls = 0

    def proxy(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            call_request = {
                "name": name,
                "arguments": encode(list(arguments), _refuse),
                "named": encode(named, _refuse),
            }
            # The candidate may have made them: it must not be able to end the tests by their size.
            channel.send({"ask": call_request}, within_limit=True)
            answer = channel.receive()
            if "gone" in answer:
                raise CandidateGone
            if "error" in answer:
                raise make_error(answer["error"], answer.get("kind"))
            try:
                return decode(answer["ok"], lambda mention: mention)
            except (ValueError, TypeError, KeyError, SyntaxError, OverflowError, RecursionError) as error:
                raise CandidateError(f"the value cannot be read: {error}") from error

        call.__name__ = name
        return call

    for name in request["names"]:
        namespace[name] = proxy(name)

    def record(holds: Any) -> None:
        nonlocal calls
        calls = 0
        tally["run"] += 1
        tally["passed"] += bool(holds)
        if tally["run"] > MAX_TESTS:
            raise CandidateGone

    def record_constant(holds: Any) -> None:
        # Such as `assert True` behind the last test, which would reward a program that fails them all. After a call it
        # shows that the tests reached this line.
        if calls:
            record(holds)

    def failed(error: Exception) -> None:
        record(False)
        tally["fault"] = tally["fault"] or describe_error(error)

    namespace.update({_RECORD: record, _CONSTANT: record_constant, _FAILED: failed})
    tree = ast.fix_missing_locations(_CountAsserts().visit(ast.parse(part)))
    exec(compile(tree, "<tests>", "exec"), namespace)
    if request["entry"] and "check" in namespace:
        namespace["check"](namespace[request["entry"]])


def _is_constant(node: ast.Assert) -> bool:
    read = {inner.id for inner in ast.walk(node.test) if isinstance(inner, ast.Name)}
    return read <= set(dir(builtins))


class _CountAsserts(ast.NodeTransformer):
    """Counts each ``assert`` of the tests, held or not, instead of an end at the first failure.

    One whose condition names nothing but built-in functions, such as ``assert True``, counts only after a call of the
    candidate that no other one has counted.
    """

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        name = _CONSTANT if _is_constant(node) else _RECORD
        record = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [node.test], []))
        failed = ast.Expr(ast.Call(ast.Name(_FAILED, ast.Load()), [ast.Name(_ERROR, ast.Load())], []))
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), _ERROR, [failed])
        return ast.copy_location(ast.Try([record], [handler], [], []), node)


def make_error(text: str, kind: Any, arguments: Sequence[Any] | None = None) -> Exception:
    """Return the error of a call, as the built-in class that tests may expect, else as :class:`CandidateError`.

    Args:
        text: message of the error.
        kind: name of the error's class.
        arguments: arguments of the class's constructor; by default the text alone.
    """
    error_class = getattr(builtins, kind, None) if isinstance(kind, str) else None
    if not (isinstance(error_class, type) and issubclass(error_class, Exception)):
        return CandidateError(text)
    if error_class in (StopIteration, UnicodeError):
        return CandidateError(text)
    try:
        error_arguments = (text,) if arguments is None else tuple(arguments)
        if issubclass(error_class, UnicodeError):
            # Their own text reads the object at their offsets, which the candidate could place outside it.
            message = text.removeprefix(f"{kind}: ")
            methods = {"__str__": lambda error: message, "__module__": error_class.__module__}
            unicode_class: Any = type(kind, (error_class,), methods)
            error = unicode_class.__new__(unicode_class)
            error.args = error_arguments
            return error
        return error_class(*error_arguments)
    except Exception:  # a class whose constructor wants other arguments
        return CandidateError(text)


def _refuse(value: Any) -> Opaque:
    raise TypeError(f"a value of type {type(value).__name__} cannot be passed to the candidate")


def unbound_names(tests: str) -> set[str]:
    """Return names that code reads but neither defines, imports nor finds among the built-ins.

    >>> unbound_names("import math\\nassert area(2) == math.pi * 4")
    {'area'}
    """
    read = {
        node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return read - bound_names(tests) - set(dir(builtins))


def bound_names(code: str) -> set[str]:
    """Return names that code defines, imports or assigns, wherever in it."""
    return bound_by(ast.walk(ast.parse(code)))


def bound_by(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names that nodes of a syntax tree define, import or assign."""
    bound: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound
