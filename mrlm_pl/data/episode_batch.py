"""Episodes on their way through a validation, test or prediction step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrlm_pl.episode import Episode
from mrlm_pl.evaluation import judged_successes


class EpisodeBatch:
    """Finished episodes on their way through a validation, test or prediction step."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.episodes = list(episodes)

    def to(self, *args: Any, **kwargs: Any) -> EpisodeBatch:
        """Itself: records live on no device."""
        return self

    def means(self) -> dict[str, tuple[float, int]]:
        """Mean and number of observations, by metric: ``reward``, and ``accuracy`` where success is known."""
        played = [episode for episode in self.episodes if not episode.failed]
        judged = judged_successes(played)
        means = {}
        if played:
            means["reward"] = (sum(episode.reward for episode in played) / len(played), len(played))
        if judged:
            means["accuracy"] = (sum(judged) / len(judged), len(judged))
        return means
