"""The command of each paper in docs/results/papers.md runs, with one small rollout or a few episodes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.documents import ROOT

pytestmark = pytest.mark.slow

TINY = ROOT / "mrlm_pl" / "policy" / "tiny_model"
PAPERS = (ROOT / "docs" / "results" / "papers.md").read_text()
COMMANDS = list(dict.fromkeys(re.findall(r"`mrlm (fit --config [^`]+)`", PAPERS)))
PLAIN = ["--trainer.callbacks", "null", "--trainer.logger", "false", "--trainer.accelerator", "cpu"]
ROLLOUT = ["--data.iterations", "1", "--trainer.limit_val_batches", "0"]
GROUPS = {"five_tasks": "5"}  # one of each task
MODELS = ("tiny-tools/policies/main", "tiny-five/policies/main", "specialists/sums", "specialists/differences")
"""Models of other runs, for which the tiny one stands in."""


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a few of the tiny model's own episodes."""
    from mrlm_pl.cli.main import main

    path = tmp_path_factory.mktemp("episodes") / "groups.jsonl"
    easy = ["--environment", "math", "--environment.difficulty", "[1, 1]", "--max-tokens", "32"]
    assert (
        main(
            ["collect", "--model", "builtin:tiny", *easy, "-n", "64", "--samples-per-task", "8", "--output", str(path)]
        )
        == 0
    )
    return path


@pytest.fixture
def here(outside_the_repository: None, episodes: Path) -> None:
    """Give the working folder the files that the configurations name."""
    for name in ("configs", "examples"):
        Path(name).symlink_to(ROOT / name)
    for name in MODELS:
        (path := Path("runs") / name).parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(TINY)
    rows = [json.dumps({"question": f"What is {number} + 1?", "answer": str(number + 1)}) for number in range(8)]
    for split in ("train", "validation", "test"):
        Path(f"runs/specialists/{split}.jsonl").write_text("\n".join(rows))
    for name in ("groups", "pairs", "pairs.validation"):
        Path(f"runs/{name}.jsonl").symlink_to(episodes)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str, here: None, mrlm: Callable[..., tuple[int, str, str]]) -> None:
    words = shlex.split(command)
    config = ROOT / words[words.index("--config") + 1]
    groups = ["--data.groups", GROUPS.get(config.stem, "4")]
    small = [*ROLLOUT, *groups] if "RolloutDataModule" in config.read_text() else ["--trainer.max_steps", "1"]
    status, _, errors = mrlm(*words, *small, *PLAIN, "--trainer.default_root_dir", "run")
    assert status == 0, errors
    assert [*Path("run/policies").glob("*/model.safetensors")]
