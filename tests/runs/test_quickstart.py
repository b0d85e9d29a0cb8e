"""The README's main job, small and whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrlm_pl.cli.main import main
from mrlm_pl.episode_files import read_episodes

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> None:
    assert main(arguments) == 0


def test_a_short_run_leaves_everything_the_readme_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder, report = tmp_path / "run", tmp_path / "eval.json"
    short = ["--data.iterations", "2", "--data.groups", "4", "--trainer.accelerator", "cpu"]
    evaluation = ["--trainer.callbacks.init_args.episodes", "16"]
    run(
        "fit",
        "--config",
        "configs/quickstart.yaml",
        *short,
        *evaluation,
        "--trainer.default_root_dir",
        str(folder),
        "--trainer.enable_progress_bar",
        "false",
    )
    names = {path.name for path in folder.iterdir()}
    expected = {"checkpoints", "policies", "episodes", "tensorboard", "metrics.csv", "config.yaml"}
    assert expected | {"evaluation_before.json", "evaluation_after.json"} <= names
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    before = json.loads((folder / "evaluation_before.json").read_text())
    assert before["math"]["settings"]["difficulty"] == [1, 1], "for `mrlm eval --compare`"
    assert len(list(read_episodes(folder / "episodes"))) == 2 * 4 * 8
    with (folder / "metrics.csv").open() as lines:
        columns = set(csv.DictReader(lines).fieldnames or ())
    assert {"rollout/reward", "rollout/entropy", "rollout/tokens_per_second", "train/kl"} <= columns

    model = AutoModelForCausalLM.from_pretrained(folder / "policies" / "main")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policies" / "main")
    assert model.config.vocab_size == len(tokenizer)

    for _ in range(2):
        arguments = ["--environment", "math", "--environment.difficulty", "[1, 1]", "--num-episodes", "20"]
        run("eval", "--model", str(folder), *arguments, "--output", str(report))
        first = report.read_bytes()
    data = json.loads(report.read_text())
    documented = "environment model split seed episodes mean_reward ci95 accuracy pass_at_k components transcripts"
    assert set(documented.split()) <= set(data)
    assert data["episodes"] == len(data["transcripts"]) == 20
    run("eval", "--model", str(folder), *arguments, "--output", str(report))
    assert report.read_bytes() == first, "the same seed gives the same file"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quick_start_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    run(
        "fit",
        "--config",
        "configs/quickstart.yaml",
        "--seed_everything",
        str(seed),
        "--trainer.default_root_dir",
        str(folder),
    )
    before, after = (
        json.loads((folder / f"evaluation_{moment}.json").read_text())["math"] for moment in ("before", "after")
    )
    assert before["accuracy"] <= 0.45
    assert after["accuracy"] >= 0.90
