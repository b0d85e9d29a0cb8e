"""The memory of a process, from Linux's process status."""

from __future__ import annotations

from pathlib import Path


def resident_mib(field: str, pid: int | str = "self") -> float:
    """Return the current (``VmRSS``) or the largest (``VmHWM``) resident memory in MiB.

    The peak of ``getrusage`` survives the start of a program: it can be that of the process which started this one.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024
