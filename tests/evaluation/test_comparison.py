"""Reports that are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.comparison import read_report

RESULT = {"task": "t", "problem": "p", "episodes": 1, "reward": 1, "accuracy": None, "majority": None}


@pytest.mark.parametrize("task", [5, None, [[]], {**RESULT, "reward": "x"}])
def test_a_report_with_tasks_of_another_form_is_named(task: Any, tmp_path: Path) -> None:
    report = {"environment": "math", "split": "test", "tasks": [RESULT], "decisions_per_task": {}}
    (tmp_path / "e.json").write_text(json.dumps(report))
    assert read_report(tmp_path / "e.json") == report
    (tmp_path / "e.json").write_text(json.dumps({**report, "tasks": [RESULT, task]}))
    with pytest.raises(ConfigurationError, match=r"e\.json' is not a report of `mrlm eval --output`"):
        read_report(tmp_path / "e.json")
