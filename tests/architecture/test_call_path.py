"""The path of a GRPO step through the files, from `fit` to the optimizer step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = 167
"""Two thirds of the 251 changes of file that the step once took."""


@pytest.mark.long
def test_a_step_changes_files_at_most_167_times() -> None:
    command = [sys.executable, "benchmarks/speed/call_path.py"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert found["functions"] > 300
    assert found["changes"] <= CHANGES, f"most entries: {found['entries']}"
