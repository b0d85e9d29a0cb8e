"""Fixtures that load examples and benchmarks as modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def find_the_example_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package of extensions on the path, as in the documents."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "plugin"))


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    """Return a loader of a new module of an example, by its path below ``examples/``."""

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def learning_benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Return a loader of a script of ``benchmarks/learning``, by its name; all benchmarks are unloaded afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks/learning"), *sys.path])  # the scripts append to it
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
