"""Configurations train on an accelerator. Run with ``pytest -m gpu``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from mrlm_pl.cli.main import main
from tests.support.documents import CONFIGS, ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

ON_GPU = ("--trainer.accelerator", "gpu", "--trainer.devices", "1", "--trainer.max_steps", "2")
ROWS = {
    "math": ("sft", "preferences/dpo", "preferences/kto", "preferences/orpo", "preferences/simpo"),
    "coordination": ("preferences/joint_reward_model", "preferences/madpo"),
}
"""Configurations below ``configs/algorithms`` that train on rows, by the environment that the rows come from."""


def needs_nothing(path: Path) -> bool:
    """Return whether a configuration trains without other libraries, models, runs, servers and processes."""
    values = json.dumps(yaml.safe_load(path.read_text()))
    own = {"adapters", "agentbench", "logging", "models", "recipes", "servers"}
    others = ("runs/", "://", "127.0.0.1:", "Ray", "Qwen/")
    return path.parent.name not in own and not any(word in values for word in others)


@pytest.mark.parametrize("path", [path for path in CONFIGS if needs_nothing(path)], ids=lambda path: path.stem)
def test_it_trains_on_episodes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["fit", "--config", str(path), "--output", str(tmp_path / "run"), *ON_GPU]) == 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the episodes of each environment, sampled on the device."""
    folder = tmp_path_factory.mktemp("rows")
    for environment in ROWS:
        collect = ["collect", "--model", "builtin:tiny", "--environment", environment, "--max-tokens", "8"]
        collect += ["--num-episodes", "256", "--samples-per-task", "8", "--device", "cuda"]
        assert main([*collect, "--output", str(folder / f"{environment}.jsonl")]) == 0
    return folder


@pytest.mark.parametrize(("environment", "name"), [(one, name) for one, names in ROWS.items() for name in names])
def test_it_trains_on_rows(environment: str, name: str, rows: Path, tmp_path: Path) -> None:
    config = ROOT / "configs" / "algorithms" / f"{name}.yaml"
    data = ("--data.train", str(rows / f"{environment}.jsonl"))
    assert main(["fit", "--config", str(config), "--output", str(tmp_path / "run"), *data, *ON_GPU]) == 0
