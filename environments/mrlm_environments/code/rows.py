"""Rows of programming data sets as tasks, and the program in a reply."""

from __future__ import annotations

import ast
import keyword
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_environments.data_tasks import check_modules
from mrlm_pl.sandbox import Tests, UnitTests, bound_names, unbound_names

ROW_FORM = "{prompt, entry_point, test}, {text, test_list} or {prompt, entry_point, pairs}"

COMPLETE = "Complete this function. Answer with the whole function in a fenced block.\n"
"""The beginning of HumanEval's prompts here."""

_FENCE = "```"
_PYTHON = ("", "python", "py", "python3")


def identity(row: Mapping[str, Any]) -> str:
    """Return text that is equal for equal problems."""
    return str(row.get("prompt") or row.get("text"))


def task_data(row: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return a task's data, of a row of one of three formats.

    - HumanEval: ``prompt`` (code that ends in the function's docstring), ``entry_point``, ``test`` (defines
      ``check(candidate)``), ``canonical_solution`` (the function's body).
    - MBPP: ``text`` or ``prompt``, ``test_list`` (assert statements), ``code``, and ``test_setup_code`` or
      ``test_imports``.
    - Own: ``prompt``, ``entry_point``, ``pairs`` (a list of [list of arguments, expected value]), and optionally
      ``solution`` (a whole program) and ``given`` (code that program and tests may rely on).

    Args:
        row: the row.
        packages: modules beyond the standard library that its tests may import.

    Raises:
        ValueError: its tests test nothing or need a module that is not there; also
            :data:`~mrlm_pl.environment.rows.REFUSALS`: it is none of them, or its tests are no Python.
    """
    data = _read(row)
    tests_of(data).required()
    ast.parse(str(data["solution"] or ""))
    if not any(isinstance(node, ast.Assert) for test in data["tests"] for node in ast.walk(ast.parse(test))):
        raise ValueError("its tests assert nothing")
    check_modules((context_of(data), *data["tests"]), packages, "the task")
    return data


def tests_of(data: Mapping[str, Any]) -> Tests | UnitTests:
    """Return the hidden tests of a task."""
    tests, names = tuple(data["tests"]), tuple(data.get("names", ()))
    if data.get("setup"):
        # It makes objects of the program's classes: tests that are given such objects use them through their program.
        methods = (textwrap.indent(f"{data['setup']}\n{test}", " " * 8) for test in tests)
        code = "".join(f"    def test_{number}(self):\n{method}\n" for number, method in enumerate(methods))
        return UnitTests(f"import unittest\nclass SetUpTests(unittest.TestCase):\n{code}", names, data["given"])
    return Tests(tests, data["entry"], context_of(data), names)


def context_of(data: Mapping[str, Any]) -> str:
    """Return the code that a task gives, with a body for a head that it ends in."""
    given = str(data["given"])
    try:
        ast.parse(given)
    except SyntaxError:
        closed = f"{given.rstrip()}\n    pass\n"
        ast.parse(closed)
        return closed
    return given


def entry_of(data: Mapping[str, Any]) -> str:
    """Return the function that a task asks for: its entry, else the first that its tests call.

    Raises:
        ValueError: the tests call none.
    """
    if data["entry"]:
        return str(data["entry"])
    for test in data["tests"]:
        for node in ast.walk(ast.parse(test)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in data["names"]:
                return node.func.id
    raise ValueError("its tests call no function of the task")


def program_of(reply: str, given: str, entry: str | None) -> str:
    """Return the program in a reply: the last fenced block with the entry, else the last one, else the whole text.

    A body alone (its first line is indented) is put under the function's head, with which the given code ends.

    >>> program_of("Sure!\\n```py\\ndef f(x):\\n    return x\\n```\\nDone.", "", "f")
    'def f(x):\\n    return x\\n'
    >>> program_of("    return 2 * x", "def f(x):\\n", "f")
    'def f(x):\\n    return 2 * x'
    """
    blocks = python_blocks(reply)
    head = re.compile(rf"^(?:async def|def|class)[ \t]+{re.escape(entry or '')}\b", re.MULTILINE)
    defining = [code for code in blocks if entry and head.search(code)]
    code = (defining or blocks or [reply])[-1]
    first = next((line for line in code.splitlines() if line.strip()), "")
    return f"{given}{code}" if first[:1] in (" ", "\t") else code


def python_blocks(reply: str) -> list[str]:
    """Return code of the reply's fenced blocks that are Python or name no language.

    >>> python_blocks("```py\\nx = 1\\n```\\nand\\n```bash\\nls\\n```")
    ['x = 1\\n']
    """
    return [code for language, code in _fenced(reply) if language in _PYTHON]


def _fenced(reply: str) -> list[tuple[str, str]]:
    """Return language and code of each fenced block, without its fence's indentation; the last may lack its end."""
    blocks: list[tuple[str, list[str]]] = []
    indentation: str | None = None
    # By lines, as a regular expression that allows spaces around the language takes quadratic time on spaces.
    for line in reply.split("\n"):
        text = line.strip()
        if indentation is None and text.startswith(_FENCE):
            indentation = line[: len(line) - len(line.lstrip())]
            blocks.append(((text[len(_FENCE) :].split() or [""])[0].lower(), []))
        elif text.startswith(_FENCE):
            indentation = None
        elif indentation is not None:
            blocks[-1][1].append(f"{line.removeprefix(indentation)}\n")
    return [(language, "".join(lines)) for language, lines in blocks]


def _read(row: Mapping[str, Any]) -> dict[str, Any]:
    if "test_list" in row:
        return _mbpp(row)
    prompt, entry = str(row["prompt"]), str(row["entry_point"])
    if not entry.isidentifier() or keyword.iskeyword(entry):
        raise ValueError(f"entry_point {entry!r} is not a name of a function")
    if "pairs" in row:
        tests = [_test_of_pair(entry, pair) for pair in row["pairs"]]
        given = str(row.get("given") or "")
        return {"prompt": prompt, "given": given, "entry": entry, "tests": tests, "solution": row.get("solution")}
    body, test = row.get("canonical_solution"), str(row["test"])
    return {
        "prompt": f"{COMPLETE}```python\n{prompt}```",
        "given": _with_imports(prompt, [test, *([] if body is None else [f"{prompt}{body}"])]),
        "entry": entry,
        "tests": [test],
        "solution": None if body is None else f"{prompt}{body}",
    }


def _with_imports(given: str, code: Sequence[str]) -> str:
    """Return given code behind imports of the standard modules that other code uses without importing them."""
    imports = "".join(f"import {name}\n" for name in sorted(set().union(*map(_modules_used, code))))
    future = re.search(r"\A(?:\s*(?:#.*)?\n)*from __future__ .*\n", given)
    return f"{given[: future.end()]}{imports}{given[future.end() :]}" if future else f"{imports}{given}"


def _modules_used(code: str) -> set[str]:
    """Return standard modules whose attributes code reads, without those that it imports or binds."""
    nodes = list(ast.walk(ast.parse(code)))
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    return (bases & sys.stdlib_module_names) - bound_names(code)


def _test_of_pair(entry: str, pair: Any) -> str:
    arguments, value = pair
    if not isinstance(arguments, (list, tuple)):
        raise TypeError(f"the arguments {arguments!r:.80} of a pair are not a list")
    ast.literal_eval(repr([arguments, value]))  # what cannot be written as Python, such as NaN, cannot be compared
    return f"assert {entry}(*{list(arguments)!r}) == {value!r}"


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    imports = row.get("test_imports") or []
    tests = [str(test) for test in row["test_list"]]
    if not tests:
        raise ValueError("test_list is empty")
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    # Published tests use modules, such as math, that only the reference program imports.
    setup = str(row.get("test_setup_code") or "")
    given = _with_imports("\n".join(map(str, imports)), [*tests, setup])
    text = str(row["text"] if "text" in row else row["prompt"])
    # Some set-ups build objects of a class that the program is to define.
    built_names = unbound_names(setup) - bound_names(given)
    if not built_names:
        given, setup = f"{given}\n{setup}", ""
    # The reference program says which names are the task's: some have the name of a built-in function.
    available_code = f"{given}\n{setup}"
    defined = (
        bound_names(str(row["code"])) if "code" in row else set(Tests(tuple(tests), None, available_code).required())
    )
    if built_names - defined and "code" in row:
        raise ValueError(
            f"test_setup_code uses {', '.join(sorted(built_names - defined))}, which its code does not define"
        )
    called = [(node.func.id, node) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls = [(name, node) for name, node in called if name in defined]
    if not calls:
        raise ValueError(f"the test {tests[0]!r} calls no function that a program could define")
    setup_note = (
        f"\nDefine {', '.join(sorted(built_names))} as well. This code comes first:\n```python\n{setup}\n```"
        if built_names
        else ""
    )
    return {
        "prompt": f"{text}\nIt is called like this: {ast.unparse(calls[0][1])}{setup_note}",
        "given": given,
        "setup": setup,
        "entry": None,
        "names": sorted({name for name, _ in calls} | built_names),
        "tests": tests,
        "solution": row.get("code"),
    }
