"""The clipping range of the importance ratio."""

from __future__ import annotations

from dataclasses import dataclass

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import positive


@dataclass(frozen=True)
class Clip:
    """The range ``[1 - low, 1 + high]`` in which the importance ratio has a gradient.

    Args:
        low: distance of its lower end from 1; 1 is no lower end. None is the default of the loss, 0.2 for ``ppo``.
        high: distance of its upper end from 1; None is the default of the loss, 0.2 for ``ppo``.
        dual: bound ``c`` of the loss at negative advantages, ``-c A`` (arXiv 1912.09729); None has no bound.

    Raises:
        ConfigurationError: a value is out of range.
    """

    low: float | None = None
    high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        positive("clip.", low=self.low, high=self.high)
        if self.low is not None and self.low > 1:
            raise ConfigurationError(f"clip.low is {self.low}; it must be at most 1, which is no lower end")
        if self.dual is not None and not self.dual > 1:
            raise ConfigurationError(f"clip.dual is {self.dual}; it must be above 1 (3 is usual), or null")

    def range(self, low: float, high: float, *, dual: bool = False) -> tuple[float, float]:
        """Return ``low`` and ``high``, by default these.

        Args:
            low, high: defaults of the loss.
            dual: whether the loss has a dual bound.

        Raises:
            ConfigurationError: there is a dual bound for a loss that has none.

        >>> Clip(high=0.28).range(0.2, 0.2)
        (0.2, 0.28)
        """
        if self.dual is not None and not dual:
            raise ConfigurationError(
                f"clip.dual is {self.dual}, but this loss bounds the weight at negative advantages in another way; "
                "leave it out, or choose ppo, gspo or luspo"
            )
        return low if self.low is None else self.low, high if self.high is None else self.high
