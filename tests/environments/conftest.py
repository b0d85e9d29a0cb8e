"""What tests of environments share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Sandbox

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def namespaces() -> None:
    """Skips where the machine does not offer namespaces."""
    try:
        _ = Sandbox(level="namespaces").isolation
    except SandboxError as error:
        pytest.skip(f"this machine does not offer namespaces: {error}")
