"""The benchmark of the machine's limit: its arithmetic by hand, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_phases_take_longer_than_their_products(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = ("benchmarks/speed/limit.py", "--sizes", "xs", "--steps", "6", "--json", str(file))
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["size"], row["precision"], row["compiled"]) == ("xs", "32-true", False)
    phases = row["phases"]
    # each of two layers: 64 x 128 (queries, keys, values), 64 x 64, 64 x 344 (gate and up), 172 x 64; head: 64 x 512
    layer = 64 * 128 + 64 * 64 + 64 * 344 + 172 * 64
    decoded, prompts = 32 * 63, 4 * 64
    assert phases["rollout"]["gflop"] * 1e9 == 2 * (2 * layer * (prompts + decoded) + 64 * 512 * (4 + decoded))
    assert phases["update"]["gflop"] * 1e9 == 2 * (2 * layer * (prompts + 32 * 63) * 3 + 64 * 512 * 32 * 64 * 4)
    for figures in phases.values():
        assert 0 < figures["products_seconds"] < figures["seconds"]
        assert 0 < figures["operators_seconds"] < figures["seconds"]
        assert 0 < figures["attention_seconds"] < figures["seconds"]
    # four products a layer and the head in each of 63 decode steps; seven and the head forward, each twice backward
    assert phases["rollout"]["operators"] > 63 * (2 * 4 + 1)
    assert phases["update"]["operators"] > 3 * (2 * 7 + 1)
