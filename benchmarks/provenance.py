"""The command, date, machine and versions behind a file of results."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from typing import Any


def provenance(peer: str = "", peer_python: str = "") -> dict[str, Any]:
    """Return what reproduces the present script's results.

    Args:
        peer: the package that it compares with.
        peer_python: the Python in which that is installed.
    """
    packages = ("torch", "lightning", "transformers")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    if peer:
        code = f"from importlib.metadata import version; print(version({peer!r}))"
        found = subprocess.run([peer_python, "-c", code], capture_output=True, text=True, check=True)
        versions[peer] = found.stdout.strip()
    module = sys.modules["__main__"].__spec__  # of `python -m`
    program = ["-m", module.name] if module else sys.argv[:1]
    return {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": versions,
    }
