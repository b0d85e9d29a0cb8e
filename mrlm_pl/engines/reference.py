"""What holds reference models elsewhere than in the learner, and computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from mrlm_pl.batch import PolicyBatch

if TYPE_CHECKING:
    from mrlm_pl.engines.gpu_places import LearnerPlace
    from mrlm_pl.policy import Policy


class Reference(ABC):
    """Log-probabilities under policies as they were before their first update."""

    @abstractmethod
    def logprobs(self, policy: Policy, rows: PolicyBatch) -> Tensor:
        """Log-probability [B, T] of each action token of a policy's rows, 0 elsewhere, on the rows' device.

        Args:
            policy: whose initial weights are meant, whatever it holds now.
            rows: B rows.
        """

    def meet_learner(self, place: LearnerPlace) -> None:
        """Take note of where the learner computes, before the first call of :meth:`logprobs`."""

    def close(self) -> None:
        """Free what is held; may be called twice."""
