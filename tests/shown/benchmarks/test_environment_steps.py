"""The benchmark of the environments' speed, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_steps_are_measured_in_process_and_over_grpc(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    small = ("--sessions", "5", "--tasks", "3", "--rounds", "2", "--json", str(file))
    subprocess.run([sys.executable, "benchmarks/speed/environment_steps.py", *small], cwd=ROOT, check=True)
    found = json.loads(file.read_text())["environments"]
    assert {"knowledge_graph", "webshop"} <= set(found)
    for figures in found.values():
        for rate in (figures["steps_per_cpu_second"], figures["grpc_steps_per_second"]):
            assert 0 < rate["lowest"] <= rate["highest"]
        assert figures["grpc_steps_per_second"]["server_cpu_ms"] > 0
        assert figures["bytes_per_session"] > 100
