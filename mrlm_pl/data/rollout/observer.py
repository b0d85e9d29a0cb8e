"""Callbacks that look at the episodes of a collection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mrlm_pl.episode import Episode


class CollectionObserver(ABC):
    """A Lightning callback that is also this is shown every collection of the rollout data module."""

    @abstractmethod
    def on_collection(self, trainer: Any, episodes: Sequence[Episode]) -> None:
        """Look at what this rank played in a collection, failed and replaced episodes included.

        Called once in each iteration on every rank, before the first update on the collection. Weights must stay as
        they are. A run that is continued in the middle of a collection does not show it again, so what is drawn from it
        belongs in the callback's ``state_dict``.
        """


def show_collection(trainer: Any, episodes: Sequence[Episode]) -> None:
    """Show a collection to all observers among the trainer's callbacks, in their order."""
    for callback in trainer.callbacks:
        if isinstance(callback, CollectionObserver):
            callback.on_collection(trainer, episodes)
