"""Reference models outside the learner, for log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mrlm_pl.engines.base import LearnerPlace
    from mrlm_pl.policy import Policy


class TokenRows(Protocol):
    """Rows of tokens, such as the learner's batches."""

    token_ids: Tensor

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of :meth:`Policy.reference_logprobs`."""


class Reference(ABC):
    """Log-probabilities under policies before their first update."""

    @abstractmethod
    def logprobs(self, policy: Policy, rows: TokenRows) -> Tensor:
        """Return the log-probability [B, T] of each action token of a policy's rows, 0 elsewhere, on the host.

        Args:
            policy: policy whose initial weights compute them.
            rows: B rows.
        """

    def meet_learner(self, place: LearnerPlace) -> None:
        """Receive the learner's devices, before the first call of :meth:`logprobs`."""
