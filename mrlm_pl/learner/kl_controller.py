"""The coefficient of a KL penalty, fixed or steered towards a target."""

from __future__ import annotations

from mrlm_pl.errors import ConfigurationError


class KLController:
    """Keeps the divergence from the reference near a target.

    After each collection of n episodes with divergence ``KL`` in nats per token (arXiv 1909.08593, section 2.2)::

        beta <- beta (1 + clip(KL / target - 1, -.2, .2) n / horizon)

    Args:
        coefficient: the first ``beta``.
        target: nats per token; None keeps ``beta`` as it is.
        horizon: episodes in which ``beta`` changes by at most a fifth, to first order.

    Raises:
        ConfigurationError: a value is out of range, or a target is given for a coefficient of 0.

    >>> controller = KLController(0.1, target=0.5, horizon=100)
    >>> controller.update(1.0, episodes=50)    # twice the target: the factor is 1 + .2 * 50 / 100
    >>> round(controller.coefficient, 6)
    0.11
    """

    def __init__(self, coefficient: float, target: float | None = None, horizon: int = 10_000) -> None:
        if coefficient < 0 or (target is not None and target <= 0) or horizon < 1:
            raise ConfigurationError(
                f"kl_coefficient {coefficient} must be 0 or above, kl_target {target} above 0, kl_horizon {horizon} "
                "1 or above"
            )
        if target is not None and coefficient == 0:
            raise ConfigurationError(
                f"kl_target is {target}, but kl_coefficient is 0, which no factor changes; start with 0.05, say"
            )
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float, episodes: int) -> None:
        """Adapt the coefficient to what one collection showed.

        Args:
            kl: mean divergence from the reference, in nats per token, over all ranks.
            episodes: number of episodes that it is the mean of.
        """
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * episodes / self.horizon
