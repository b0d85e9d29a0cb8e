"""Runs begin outside the repository."""

from __future__ import annotations

import lightning.pytorch  # noqa: F401  its log handler keeps the stream that it finds, so not a captured one
import pytest


@pytest.fixture(autouse=True)
def leave_the_repository(outside_the_repository: None) -> None:
    """Run every test of this folder in its own folder."""
