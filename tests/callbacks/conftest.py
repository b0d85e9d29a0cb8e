"""A quick run of self-play."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.duel import make


@pytest.fixture
def duel(model_folder: Path) -> Any:
    """A factory of an algorithm, data and the callback, for a run of self-play."""
    return partial(make, str(model_folder))
