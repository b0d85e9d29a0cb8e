"""The exported models of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from mrlm_pl.errors import PolicyError
from mrlm_pl.model_folders import exported_policies, policy_folder


def test_a_draft_that_a_kill_left_is_no_policy(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    for name in ("main.part", "main.old"):
        (run / "policies" / name).mkdir(parents=True)
        (run / "policies" / name / "config.json").write_text("{}")
    (run / "config.yaml").touch()
    with pytest.raises(
        PolicyError,
        match=r"has no policies, .* `mrlm train --output '.*my run' --resume` continues it, or writes .* again",
    ):
        policy_folder(str(run), "--model")
    whole = run / "policies" / "main"
    whole.mkdir()
    (whole / "config.json").write_text("{}")
    assert exported_policies(run) == [whole]


def test_a_revision_of_a_hub_model_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "models--lab--small"
    folders = {name: cached / "snapshots" / (name * 40) for name in ("a", "b")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "v1").write_text("a" * 40)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()  # a folder of the owner's name
    assert policy_folder("lab/small@v1", "--model") == str(folders["a"])
    assert policy_folder(f"lab/small@{'b' * 40}", "--model") == str(folders["b"])
    message = (
        r"--model: there is no folder 'lab/small@v2'; check the path, or read .* `hf download lab/small --revision v2`"
    )
    with pytest.raises(PolicyError, match=message):
        policy_folder("lab/small@v2", "--model")
    (tmp_path / "lab").rmdir()
    with pytest.raises(
        PolicyError, match=r"--model: the hub does not give revision 'v2' of 'lab/small' \(.*name a branch"
    ):
        policy_folder("lab/small@v2", "--model")
