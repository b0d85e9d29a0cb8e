"""The command, date, machine and versions behind a file of results."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(
    peer: str = "", peer_python: str = "", kept: Mapping[str, Any] | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Return what reproduces the present script's results.

    Args:
        peer: name of the package that the script compares with.
        peer_python: Python interpreter with that package.
        kept: file of results that the present script adds to; its commands come first.
        device: device of the computation.
    """
    packages = ("torch", "lightning", "transformers")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    if peer:
        code = f"from importlib.metadata import version; print(version({peer!r}))"
        found = subprocess.run([peer_python, "-c", code], capture_output=True, text=True, check=True)
        versions[peer] = found.stdout.strip()
    module = sys.modules["__main__"].__spec__  # of `python -m`
    program = ["-m", module.name] if module else sys.argv[:1]
    command = shlex.join(["python", *program, *sys.argv[1:]])
    earlier = kept["command"].split(" && ") if kept else []
    machine = {"cores": os.cpu_count(), "processor": processor()}
    if device.startswith("cuda"):
        import torch

        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "command": " && ".join(dict.fromkeys([*earlier, command])),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "versions": versions,
    }


def commit() -> str:
    """Return the short hash of the present commit, with a ``+`` if files differ from it; empty outside git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    if shutil.which("git") is None:
        return ""
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def processor() -> str:
    """Return the processor's architecture, with its vendor and the widest vector and matrix instructions, by Linux."""
    information = Path("/proc/cpuinfo")
    flags = information.read_text().split() if information.exists() else []
    vector = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    bf16 = "BF16" if {"avx512_bf16", "amx_bf16"} & set(flags) else ""
    vendor = next((name for flag, name in (("AuthenticAMD", "AMD"), ("GenuineIntel", "Intel")) if flag in flags), "")
    return " ".join(filter(None, (platform.machine(), vendor, vector, "AMX" if "amx_tile" in flags else "", bf16)))
