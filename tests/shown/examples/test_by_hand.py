"""The examples that play an environment without a model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_sql_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "sql_by_hand.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("count:", "update:"))] == ["count: 1.0", "update: 1.0"]


def test_shell_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "shell_by_hand.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("How many lines of ~/app.log")
    assert lines[1:] == ["right: 1.0", "wrong: 0.0"]
