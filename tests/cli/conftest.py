"""Makes a third party's plugin visible, as an installed distribution is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch  # noqa: F401  its log handler keeps the stream that it finds, so not a captured one
import pytest

from mrlm_pl.cli.main import main

collect_ignore = ["plugin"]
PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(autouse=True)
def run_outside_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MRLM_DEBUG", "MRLM_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mrlm(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
