"""The clipping range of the importance ratio."""

from __future__ import annotations

from dataclasses import dataclass

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import positive


@dataclass(frozen=True)
class Clip:
    """The range ``[1 - low, 1 + high]`` in which the importance ratio has a gradient.

    Args:
        low: distance of its lower end from 1; 1 is no lower end.
        high: distance of its upper end from 1.
        dual: bound ``c`` of the loss at negative advantages, ``-c A`` (arXiv 1912.09729); None has no bound.

    Raises:
        ConfigurationError: a value is out of range.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        positive("clip.", low=self.low, high=self.high)
        if self.low > 1:
            raise ConfigurationError(f"clip.low is {self.low}; it must be at most 1, which is no lower end")
        if self.dual is not None and not self.dual > 1:
            raise ConfigurationError(f"clip.dual is {self.dual}; it must be above 1 (3 is usual), or null")
