"""Weights of environments that follow how often they are solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mrlm_pl.errors import ConfigurationError


@dataclass(frozen=True)
class SuccessRateCurriculum:
    """Gives environments that are neither always nor never solved more of the tasks.

    With ``b_e`` the share of an environment by ``data.weights`` and ``p_e`` its success rate, a moving average over the
    iterations that it was played in::

        share_e = floor b_e + (1 - floor) b_e v_e / sum_k(b_k v_k),   v_e = p_e (1 - p_e)
        p_e    <- p_e + rate (successes / episodes - p_e)             after each iteration, begun with ``start``

    ``v_e`` is the variance of a success: where it is 0 all episodes of a group are alike, and comparing them teaches
    nothing. Levels of difficulty are environments with names of their own (``data.names``).

    Args:
        floor: part of the tasks that is always shared out by ``data.weights``, so that nothing is forgotten.
        rate: of the moving average, in each iteration.
        start: success rate of an environment before it was played.

    Raises:
        ConfigurationError: a value out of range.

    >>> SuccessRateCurriculum(floor=0.5).shares({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.0})
    {'a': 0.75, 'b': 0.25}
    """

    floor: float = 0.2
    rate: float = 0.2
    start: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.floor <= 1 and 0 < self.rate <= 1 and 0 <= self.start <= 1):
            raise ConfigurationError(
                f"data.curriculum: floor is {self.floor}, rate {self.rate} and start {self.start}; floor and rate must "
                "be above 0 and at most 1, start from 0 to 1"
            )

    def shares(self, base: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
        """The share of each environment; they sum to 1.

        Args:
            base: by ``data.weights``, summing to 1.
            rates: success rates.
        """
        pull = {name: share * rates[name] * (1 - rates[name]) for name, share in base.items()}
        total = sum(pull.values())
        if not total:
            return dict(base)
        return {name: self.floor * share + (1 - self.floor) * pull[name] / total for name, share in base.items()}

    def updated(self, rates: Mapping[str, float], found: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """The success rates after an iteration.

        Args:
            rates: before.
            found: (successes, episodes) of the environments that were played.

        >>> SuccessRateCurriculum(rate=0.25).updated({"a": 0.5, "b": 0.5}, {"a": (8, 8)})
        {'a': 0.625, 'b': 0.5}
        """
        after = dict(rates)
        for name, (successes, episodes) in found.items():
            if episodes:
                after[name] += self.rate * (successes / episodes - after[name])
        return after
