from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("own_code_tasks.py")


def test_its_rows_hold_the_digits(script: ModuleType) -> None:
    rows = {row["prompt"].partition("base ")[2].partition(" ")[0]: row["pairs"] for row in script.rows()}
    assert len(rows) == 40
    assert rows["10"][-1] == [[12345], [1, 2, 3, 4, 5]]
    assert rows["2"][-1] == [[12345], [int(digit) for digit in f"{12345:b}"]]
    assert rows["16"][2:4] == [[[15], [15]], [[16], [1, 0]]]


def test_it_grades_programs(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    shown = dict(line.split(": ") for line in capsys.readouterr().out.splitlines()[1:])
    assert (shown["right"], shown["cheat"], shown["broken"]) == ("2.0", "0.0", "-0.5")
    assert 0 < float(shown["decimal"]) < 1
