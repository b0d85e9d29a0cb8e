"""Rows of programming data sets as tasks, and the program in a reply."""

from __future__ import annotations

import ast
import keyword
import re
import sys
from collections.abc import Mapping
from typing import Any

from mrlm_environments.data_tasks import fault_of
from mrlm_pl.errors import DataError
from mrlm_pl.sandbox import Tests, bound_names

FIELDS = ("prompt", "text")
"""Where a row's text stands, whichever it has."""

COMPLETE = "Complete this function. Answer with the whole function in a fenced block.\n"
"""What HumanEval's prompts begin with here."""

_FENCE = "```"
_PYTHON = ("", "python", "py", "python3")


def identity(row: Mapping[str, Any]) -> str:
    """Text that is equal for equal problems."""
    return str(row.get(FIELDS[0]) or row.get(FIELDS[1]))


def task_data(row: Mapping[str, Any], number: int, source: object) -> dict[str, Any]:
    """A task's data, of a row of one of three formats.

    - HumanEval: ``prompt`` (code that ends in the function's docstring), ``entry_point``, ``test`` (defines
      ``check(candidate)``), ``canonical_solution`` (the function's body).
    - MBPP: ``text`` or ``prompt``, ``test_list`` (assert statements), ``code``, and ``test_setup_code`` or
      ``test_imports``.
    - Own: ``prompt``, ``entry_point``, ``pairs`` (a list of [list of arguments, expected value]), and optionally
      ``solution`` (a whole program) and ``given`` (code that program and tests may rely on).

    Raises:
        DataError: it is none of them, or its tests are no Python or test nothing; with the row's number.
    """
    try:
        made = _read(row)
        tests_of(made).required()
        asserted = [
            node for test in made["tests"] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Assert)
        ]
        if not asserted:
            raise ValueError("its tests assert nothing")
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise DataError(
            f"code data {source!r}, row {number}: {fault_of(error)}; a row has "
            "{prompt, entry_point, test}, {text, test_list} or {prompt, entry_point, pairs}, and this one the fields "
            f"{sorted(row)}"
        ) from error
    return made


def tests_of(data: Mapping[str, Any]) -> Tests:
    """The hidden tests of a task."""
    return Tests(tuple(data["tests"]), data["entry"], data["given"], tuple(data.get("names", ())))


def entry_of(data: Mapping[str, Any]) -> str:
    """The function that a task asks for: its entry, else the first that its tests call.

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
    """The program in a reply: the last fenced block that defines the entry, else the last one, else the whole text.

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
    """Code of the reply's fenced blocks that are Python or name no language.

    >>> python_blocks("```py\\nx = 1\\n```\\nand\\n```bash\\nls\\n```")
    ['x = 1\\n']
    """
    return [code for language, code in _fenced(reply) if language in _PYTHON]


def _fenced(reply: str) -> list[tuple[str, str]]:
    """Language and code of each fenced block; the last one may lack its end. Code loses its fence's indentation."""
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
        raise ValueError(f"entry_point {entry!r} is no name of a function")
    if "pairs" in row:
        tests = [_test_of_pair(entry, pair) for pair in row["pairs"]]
        given = str(row.get("given") or "")
        return {"prompt": prompt, "given": given, "entry": entry, "tests": tests, "solution": row.get("solution")}
    body = row.get("canonical_solution")
    return {
        "prompt": f"{COMPLETE}```python\n{prompt}```",
        "given": prompt,
        "entry": entry,
        "tests": [str(row["test"])],
        "solution": None if body is None else f"{prompt}{body}",
    }


def _test_of_pair(entry: str, pair: Any) -> str:
    arguments, value = pair
    if not isinstance(arguments, (list, tuple)):
        raise TypeError(f"the arguments {arguments!r:.80} of a pair are no list")
    ast.literal_eval(repr([arguments, value]))  # what cannot be written as Python, such as NaN, cannot be compared
    return f"assert {entry}(*{list(arguments)!r}) == {value!r}"


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    imports = row.get("test_imports") or []
    tests = [str(test) for test in row["test_list"]]
    if not tests:
        raise ValueError("test_list is empty")
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    # Published tests use modules, such as math, that only the reference program imports.
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = [f"import {name}" for name in sorted(bases & sys.stdlib_module_names)]
    setup = "\n".join([*map(str, imports), *modules, str(row.get("test_setup_code") or "")])
    text = str(row["text"] if "text" in row else row["prompt"])
    # The reference program says which names are the task's: some have the name of a built-in function.
    defined = bound_names(str(row["code"])) if "code" in row else Tests(tuple(tests), None, setup).required()
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in defined]
    if not calls:
        raise ValueError(f"the test {tests[0]!r} calls no function that a program could define")
    return {
        "prompt": f"{text}\nIt is called like this: {ast.unparse(calls[0])}",
        "given": setup,
        "entry": None,
        "names": sorted({call.func.id for call in calls if isinstance(call.func, ast.Name)}),
        "tests": tests,
        "solution": row.get("code"),
    }
