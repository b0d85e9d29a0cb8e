"""The exported models of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_an_adapter_is_named_as_such(tmp_path: Path) -> None:
    """It was said not to be a folder of a model, without the way to one."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(PolicyError, match=r"^model: '.*' is an adapter; name the folder of the merged weights"):
        policy_folder(str(tmp_path), "model")


def test_the_models_inside_an_export_are_named(tmp_path: Path) -> None:
    for name in ("solver", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=rf"; name {tmp_path}/judge or {tmp_path}/solver, or write a model there"):
        policy_folder(str(tmp_path), "model")
