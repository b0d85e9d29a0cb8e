"""The exported models of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrlm_pl.errors import PolicyError
from mrlm_pl.model_folders import exported_policies, policy_folder


def test_a_draft_that_a_kill_left_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for name in ("main.part", "main.old"):
        (tmp_path / "policies" / name).mkdir(parents=True)
        (tmp_path / "policies" / name / "config.json").write_text("{}")
    with pytest.raises(
        PolicyError, match=r"has no policies yet, .* continue it with `mrlm train --output .* --resume`"
    ):
        policy_folder(str(tmp_path), "--model")
    whole = tmp_path / "policies" / "main"
    whole.mkdir()
    (whole / "config.json").write_text("{}")
    assert exported_policies(tmp_path) == [whole]
