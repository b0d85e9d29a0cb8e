from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tools import ToolError


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("own_tool.py")


def test_its_environment_keeps_the_contract(script: ModuleType) -> None:
    report = check_environment(script.RomanSums())
    report.raise_on_failure()
    # 0.5 + 0.3 + 0.2 (1 - 1/6)
    assert "0.966667" in next(check.message for check in report.checks if check.name == "best replies")


def test_its_tool(script: ModuleType) -> None:
    tool = script.RomanNumerals()
    assert tool.call({"numeral": "MCMXCIV"}) == "1994"
    assert tool.call({"numeral": " iv "}) == "4"
    for text in ("", "IIII", "IC", "hello", "M" * 5000):
        with pytest.raises(ToolError):
            tool.call({"numeral": text})


def test_it_plays_an_episode(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    shown = capsys.readouterr().out
    assert "tool: " in shown
    assert "'correct': 0.5" in shown
