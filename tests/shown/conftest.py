"""Fixtures that load examples as modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


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
