"""The records of a test's own log."""

from __future__ import annotations

import logging
import threading

import pytest


def logged_here(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what this package has logged in this thread: threads and garbage of earlier tests log too."""
    return [item for item in caplog.records if item.name.startswith("mrlm") and item.thread == threading.get_ident()]
