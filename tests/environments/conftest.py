"""Fixtures of the tests of environments."""

from __future__ import annotations

import pytest

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Sandbox


@pytest.fixture
def namespaces() -> None:
    """Skips where the machine does not offer namespaces."""
    try:
        _ = Sandbox(level="namespaces").isolation
    except SandboxError as error:
        pytest.skip(f"this machine does not offer namespaces: {error}")
