"""Suggestions for misspelled names."""

from pathlib import Path

import pytest

from mrlm_pl.errors import nearest, nearest_path


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("GPRO", ("GSPO", "GRPO"), "GRPO"),
        ("gpro", ("GSPO", "GRPO"), "GRPO"),
        ("PPOO", ("PPO", "RLOO"), "PPO"),
        ("clpi", ("clip_low", "clip"), "clip"),
        ("xyz", ("GRPO",), None),
        ("", ("GRPO",), None),
        ("DAPO", ["DPO", "GRPO"], "GRPO"),
    ],
)
def test_swapped_letters_come_first(name, known, meant):
    assert nearest(name, known) == meant


def test_a_path_has_the_nearest_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstat.json").touch()
    assert nearest_path(tmp_path / "quickstat", folders=True) == tmp_path / "quickstart"
    assert nearest_path(tmp_path / "quickstat") == tmp_path / "quickstat.json"
    assert nearest_path(tmp_path / "quickstart.jsn") == tmp_path / "quickstat.json"
    assert nearest_path(tmp_path / "missing.json") is None, "an equal suffix alone is no likeness"
    for name in ("math.jsonl.zst", "TRAIN.JSONL"):
        (tmp_path / name).touch()
    assert nearest_path(tmp_path / "math") == tmp_path / "math.jsonl.zst"
    assert nearest_path(tmp_path / "train.jsonl") == tmp_path / "TRAIN.JSONL"
    (tmp_path / "qwen2.5-grpo").mkdir()
    assert nearest_path(tmp_path / "qwen3-grpo", folders=True) == tmp_path / "qwen2.5-grpo"
    assert nearest_path(tmp_path / "absent" / "quickstat") is None


def test_the_order_of_a_folder_does_not_choose_a_near_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "run_b.json", tmp_path / "run_a.json"]
    for file in files:
        file.touch()
    for listed in (files, files[::-1]):
        monkeypatch.setattr(Path, "iterdir", lambda _, listed=listed: iter(listed))
        assert nearest_path(tmp_path / "run.json") == tmp_path / "run_a.json"
