"""The scripts of the benchmarks find their modules, and the results page's commands write no file of results."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import results_page
from tests.support.documents import ROOT

SCRIPTS = {path.stem: path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}


def not_found(script: Path, folders: list[str], known: set[str]) -> Iterator[str]:
    """Yield the benchmarks that a script imports, itself or by others, before their folder is on the path."""
    names = {"sys": SimpleNamespace(path=folders), "Path": Path, "__file__": str(script)}
    for node in ast.parse(script.read_text()).body:
        if ast.unparse(node).startswith(("ROOT = ", "sys.path.insert(")):
            exec(ast.unparse(node), names)
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in {*found} & {*SCRIPTS} - known:
            known.add(name)
            if not any((Path(folder) / f"{name}.py").is_file() for folder in folders):
                yield name
            else:
                yield from not_found(SCRIPTS[name], folders, known)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda path: path.stem)
def test_a_script_finds_the_modules_that_it_imports(script: Path) -> None:
    assert [*not_found(script, [str(script.parent)], set())] == []


def test_the_commands_of_the_page_write_no_file_of_results() -> None:
    assert "--json benchmarks/results" not in results_page.page()
