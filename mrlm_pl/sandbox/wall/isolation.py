"""The strength of a sandbox: three levels, from the strongest that a machine can offer down to mere limits."""

from __future__ import annotations

from typing import Literal

IsolationName = Literal["limits", "landlock", "namespaces"]

STRENGTH: dict[IsolationName, int] = {"limits": 1, "landlock": 2, "namespaces": 3}
"""Strength of each level, from the weakest on; see docs/environments/sandbox.md for what each one stops.

``limits`` bounds time, memory, files and output. A program can read, write and connect as its user can. ``landlock``
also closes the file system (Landlock), network, new processes and signals (seccomp). ``namespaces`` also gives it its
own processes, users, mounts, network and a private disk in memory, gone at the end.
"""
