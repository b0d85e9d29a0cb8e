"""Rows of ClassEval as tasks, and the parts of a solution that each agent would write."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_environments.class_completion.merge import class_of, is_stub
from mrlm_environments.code.syntax import METHOD
from mrlm_environments.data_tasks import check_modules
from mrlm_pl.sandbox import UnitTests

FIELDS = ("skeleton", "class_name", "test")
ROW_FORM = f"{{{', '.join(FIELDS)}}} as in ClassEval"


def class_task(row: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return a task's data, of a row with ClassEval's fields.

    A row has ``skeleton``, ``class_name`` and ``test`` (``unittest`` classes), and optionally ``solution_code``,
    ``import_statement``, ``methods_info`` (the methods to write; else all stubs but ``__init__``) and
    ``class_constructor``.

    Args:
        row: the row.
        packages: modules beyond the standard library that its code may import.

    Raises:
        ValueError: the row needs a module that is not there; also :data:`~mrlm_pl.environment.rows.REFUSALS`: it is no
            task of this kind.
    """
    name, tests = str(row["class_name"]), str(row["test"])
    skeleton = _skeleton(row, name)
    tree = ast.parse(skeleton)
    stubs = [node for node in class_of(tree, name).body if isinstance(node, METHOD)]
    if row.get("methods_info"):
        wanted = [str(info["method_name"]) for info in row["methods_info"]]
    else:
        wanted = [node.name for node in stubs if is_stub(node) and node.name != "__init__"]
    methods = list(dict.fromkeys(node.name for node in stubs if node.name in wanted))
    if not methods or set(wanted) - set(methods):
        missing = ", ".join(sorted(set(wanted) - set(methods)))
        raise ValueError(f"its skeleton has no method to write{f' of the name {missing}' if missing else ''}")
    if not any(isinstance(node, METHOD) and node.name.startswith("test") for node in ast.walk(ast.parse(tests))):
        raise ValueError("its tests have no test method")
    given = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports = row.get("import_statement") or []
    imports = [imports] if isinstance(imports, str) else [str(line) for line in imports]
    context = "\n".join(dict.fromkeys([*imports, *map(ast.unparse, given)]))
    ast.parse(context)
    solution = row.get("solution_code")
    if solution is not None:
        class_of(ast.parse(str(solution)), name)
    check_modules((context, tests, skeleton, solution or ""), packages, f"the class {name}")
    return {
        "skeleton": skeleton, "class": name, "methods": methods, "tests": tests, "context": context,
        "solution": solution,
    }  # fmt: skip


def tests_of(data: Mapping[str, Any]) -> UnitTests:
    """Return the hidden tests of a task."""
    operators = [method for method in data["methods"] if method.startswith("__") and method.endswith("__")]
    return UnitTests(data["tests"], (data["class"],), data["context"], tuple(operators))


def solution_parts(data: Mapping[str, Any], parts: Sequence[Sequence[str]]) -> list[str]:
    """Return the solution divided by methods; helpers and constants of no method go to the first agent."""
    asked = {method for part in parts for method in part}
    sources = []
    for number, part in enumerate(parts):
        tree = ast.parse(data["solution"])
        target = class_of(tree, data["class"])
        target.body = [
            node
            for node in target.body
            if (node.name in part if isinstance(node, METHOD) and node.name in asked else number == 0)
        ] or [ast.Pass()]
        imports = (ast.Import, ast.ImportFrom)
        tree.body = [node for node in tree.body if node is target or number == 0 or isinstance(node, imports)]
        sources.append(ast.unparse(tree))
    return sources


def _skeleton(row: Mapping[str, Any], name: str) -> str:
    """Return the row's skeleton; put together of its parts where the published text is no Python or has no class."""
    skeleton = str(row["skeleton"])
    try:
        class_of(ast.parse(skeleton), name)
        return skeleton
    except (SyntaxError, ValueError):
        if not row.get("class_constructor") or not row.get("methods_info"):
            raise
    imports = ast.parse("\n".join(row.get("import_statement") or [])).body
    target = class_of(ast.parse(str(row["class_constructor"])), name)
    target.body += [node for info in row["methods_info"] for node in _described(str(info["method_description"]))]
    return ast.unparse(ast.Module([*imports, target], []))


def _described(method: str) -> list[ast.stmt]:
    """Return a method's head and docstring, which some published ones do not close."""
    try:
        return ast.parse(method).body
    except SyntaxError:
        return ast.parse(f'{method}\n    """').body
