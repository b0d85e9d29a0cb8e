"""An alarm for a learner that plays much worse against fixed opponents than before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrlm_pl.errors import ConfigurationError


@dataclass(frozen=True)
class CollapseAlarm:
    """The definition of a collapse, and the reaction to it.

    Args:
        margin: alarm when the score against an anchor is more than this below the best earlier one, also that
            before training. A score of n games has a standard error of up to ``.5 / sqrt(n)``, so choose more than
            three times that.
        floor: alarm also when the score against an anchor is below this; None has no such bound.
        action: ``warn`` logs it; ``stop`` ends the run in order, with its export.

    Raises:
        ConfigurationError: a number is out of range.
    """

    margin: float = 0.2
    floor: float | None = None
    action: Literal["warn", "stop"] = "warn"

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 1 or not 0 <= (self.floor or 0.0) <= 1:
            raise ConfigurationError(
                f"the alarm of SelfPlay has margin {self.margin} and floor {self.floor}; scores are from 0 to 1, so "
                "both must be too, and the margin above 0"
            )

    def reason(self, score: float, best: float) -> str | None:
        """Return the reason why a score is alarming, or None.

        >>> alarm = CollapseAlarm(margin=0.25, floor=0.5)
        >>> alarm.reason(0.75, best=1.0), alarm.reason(0.5, best=0.5)
        (None, None)
        >>> alarm.reason(0.5, best=1.0)
        '0.500 is more than 0.25 below the best, 1.000'
        >>> alarm.reason(0.4, best=0.5)
        '0.400 is below 0.5'
        """
        if best - score > self.margin:
            return f"{score:.3f} is more than {self.margin:g} below the best, {best:.3f}"
        if self.floor is not None and score < self.floor:
            return f"{score:.3f} is below {self.floor:g}"
        return None
