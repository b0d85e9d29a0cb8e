from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "examples" / "own_code_tasks.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_code_tasks", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_rows_hold_the_digits() -> None:
    rows = {row["prompt"].partition("base ")[2].partition(" ")[0]: row["pairs"] for row in load().rows()}
    assert len(rows) == 40
    assert rows["10"][-1] == [[12345], [1, 2, 3, 4, 5]]
    assert rows["2"][-1] == [[12345], [int(digit) for digit in f"{12345:b}"]]
    assert rows["16"][2:4] == [[[15], [15]], [[16], [1, 0]]]


def test_it_grades_programs(capsys: pytest.CaptureFixture[str]) -> None:
    load().main()
    shown = dict(line.split(": ") for line in capsys.readouterr().out.splitlines()[1:])
    assert (shown["right"], shown["cheat"], shown["broken"]) == ("2.0", "0.0", "-0.5")
    assert 0 < float(shown["decimal"]) < 1
