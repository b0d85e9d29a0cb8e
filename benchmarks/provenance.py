"""The command, date, machine and versions behind a file of results."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib.metadata import version
from typing import Any


def provenance() -> dict[str, Any]:
    """Return what reproduces the present script's results."""
    packages = ("torch", "lightning", "transformers")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
