"""Commands run outside the repository, with a third party's plugin visible as an installed distribution is."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch  # noqa: F401  its log handler keeps the stream that it finds, so not a captured one
import pytest

collect_ignore = ["plugin"]
PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(autouse=True)
def with_a_plugin(outside_the_repository: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
