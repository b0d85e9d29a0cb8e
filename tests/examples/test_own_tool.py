from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mrlm_pl.environment_check import check_environment
from mrlm_pl.tools import ToolError

PATH = Path(__file__).parents[2] / "examples" / "own_tool.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_tool", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_environment_keeps_the_contract() -> None:
    report = check_environment(load().RomanSums())
    report.raise_on_failure()
    # .5 + .3 + .2 (1 - 1/6)
    assert "0.966667" in next(check.message for check in report.checks if check.name == "best replies")


def test_its_tool() -> None:
    tool = load().RomanNumerals()
    assert tool.call({"numeral": "MCMXCIV"}) == "1994"
    assert tool.call({"numeral": " iv "}) == "4"
    for text in ("", "IIII", "IC", "hello", "M" * 5000):
        with pytest.raises(ToolError):
            tool.call({"numeral": text})


def test_it_plays_an_episode(capsys: pytest.CaptureFixture[str]) -> None:
    load().main()
    shown = capsys.readouterr().out
    assert "tool: " in shown
    assert "'correct': 0.5" in shown
