"""Callbacks that look at the episodes of a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mrlm_pl.episode import Episode


class CollectionObserver(ABC):
    """A Lightning callback of this class is called with every rollout of the data module."""

    @abstractmethod
    def on_collection(self, trainer: Any, episodes: Sequence[Episode]) -> None:
        """Look at the episodes that this rank played in an iteration, failed and replaced ones included.

        Called once in each iteration on every rank, before its first update. It must not change weights. A run that is
        resumed in the middle of an iteration does not call it again, so keep its results in the callback's
        ``state_dict``.
        """
