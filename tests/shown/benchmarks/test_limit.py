"""The benchmark of the machine's limit: its arithmetic by hand, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# each of two layers: 64 x 128 (queries, keys, values), 64 x 64, 64 x 344 (gate and up), 172 x 64
LAYERS = 2 * (64 * 128 + 64 * 64 + 64 * 344 + 172 * 64)
HEAD = 64 * 512


def phases_of(file: Path, *options: str) -> dict[str, dict[str, float]]:
    """Return the figures of both phases, each longer than its parts."""
    command = ("benchmarks/speed/limit.py", "--sizes", "xs", "--steps", "6", "--json", str(file), *options)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["size"], row["precision"], row["compiled"]) == ("xs", "32-true", False)
    for figures in row["phases"].values():
        assert 0 < figures["products_seconds"] < figures["seconds"]
        assert 0 < figures["operators_seconds"] < figures["seconds"]
    return row["phases"]


@pytest.mark.slow
def test_phases_take_longer_than_their_products(tmp_path: Path) -> None:
    phases = phases_of(tmp_path / "figures.json")
    decoded, prompts = 32 * 63, 4 * 64
    assert phases["rollout"]["gflop"] * 1e9 == 2 * (LAYERS * (prompts + decoded) + HEAD * (4 + decoded))
    assert phases["update"]["gflop"] * 1e9 == 2 * (LAYERS * (prompts + 32 * 63) * 3 + HEAD * 32 * 64 * 4)
    for figures in phases.values():
        assert 0 < figures["attention_seconds"] < figures["seconds"]
    # four products a layer and the head in each of 63 decode steps; seven and the head forward, each twice backward
    assert phases["rollout"]["operators"] > 63 * (2 * 4 + 1)
    assert phases["update"]["operators"] > 3 * (2 * 7 + 1)


@pytest.mark.slow
def test_a_teams_products_take_each_token_of_the_tree_once(tmp_path: Path) -> None:
    """Two agents, four replies of 32 tokens in the first state and in each of the four after it."""
    phases = phases_of(tmp_path / "figures.json", "--turns", "2")
    decoded = 2 * (4 + 16) * 31
    # before the first turn the prompt, before the second the last token of each reply and one more word
    assert phases["rollout"]["gflop"] * 1e9 == 2 * (
        LAYERS * (2 * 64 + 2 * 4 * 2 + decoded) + HEAD * (2 + 2 * 4 + decoded)
    )
    fed = 2 * (64 + 4 * 33 + 16 * 31)
    assert phases["update"]["gflop"] * 1e9 == 2 * (LAYERS * fed * 3 + HEAD * 2 * 20 * 32 * 4)
