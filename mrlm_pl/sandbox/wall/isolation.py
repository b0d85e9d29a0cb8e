"""The strength of a sandbox: three levels, from the strongest that a machine can offer down to mere limits."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, cast

IsolationName = Literal["limits", "landlock", "namespaces"]


class Isolation(IntEnum):
    """Levels in the order of their strength; see docs/sandbox.md for what each one stops.

    >>> Isolation.of("landlock") < Isolation.NAMESPACES
    True
    """

    LIMITS = 1
    """Time, memory, files and output are bounded. A program can read, write and connect as its user can."""

    LANDLOCK = 2
    """Also closed: the file system (Landlock), network, new processes and signals (seccomp)."""

    NAMESPACES = 3
    """Also its own processes, users, mounts, network and a private disk in memory, gone at the end."""

    @property
    def title(self) -> IsolationName:
        """The name that options and results use."""
        return cast(IsolationName, self.name.lower())

    @classmethod
    def of(cls, name: str) -> Isolation:
        """Return the level of a name.

        Raises:
            KeyError: there is no such level.
        """
        return cls[name.upper()]
