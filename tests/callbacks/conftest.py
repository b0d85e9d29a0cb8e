"""A quick run of self-play."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from duel import make


@pytest.fixture
def duel(model_folder: Path) -> Any:
    """A factory of an algorithm, data and the callback, for a run of self-play."""
    return partial(make, str(model_folder))
