"""Episodes on their way through a validation, test or prediction step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.agent_measures import means_by_agent
from mrlm_pl.episode import Episode
from mrlm_pl.evaluation import judged_successes


class EpisodeBatch:
    """Finished episodes on their way through a validation, test or prediction step.

    Args:
        episodes: of any environments.
        by_task: whether the numbers are also told of each environment.
    """

    def __init__(self, episodes: Sequence[Episode], by_task: bool = False) -> None:
        self.episodes, self.by_task = list(episodes), by_task

    def to(self, *args: Any, **kwargs: Any) -> EpisodeBatch:
        """Itself: records live on no device."""
        return self

    def means(self) -> dict[str, tuple[float, float]]:
        """Return mean and number of observations by metric: ``reward``, and ``accuracy`` where success is known.

        Failed episodes have neither. Where all failed, both are NaN of 0 observations: nothing is known. Episodes of
        several agents also have ``agent/NAME/...``; see :func:`mrlm_pl.agent_measures.means_by_agent`.
        """
        means = dict(_means(self.episodes))
        played = [episode for episode in self.episodes if not episode.failed and episode.team_size > 1]
        turns = [(turn, row) for episode in played for row in episode.rows() for turn in row.turns]
        for name, (total, count) in means_by_agent(played, [1.0] * len(played), turns).items():
            if name.startswith("agent/"):
                means[name] = total / count, count
        for name in dict.fromkeys(episode.task.environment for episode in self.episodes if self.by_task):
            own = _means([episode for episode in self.episodes if episode.task.environment == name])
            means |= {f"{name}/{metric}": mean for metric, mean in own.items()}
        return means

    def counts(self) -> dict[str, int]:
        """``failed_episodes``, by name."""
        return {"failed_episodes": sum(episode.failed for episode in self.episodes)}


def _means(episodes: Sequence[Episode]) -> Mapping[str, tuple[float, float]]:
    played = [episode for episode in episodes if not episode.failed]
    if not played:
        return {"reward": (math.nan, 0), "accuracy": (math.nan, 0)} if episodes else {}
    means = {"reward": (sum(episode.reward for episode in played) / len(played), len(played))}
    judged = judged_successes(played)
    if judged:
        means["accuracy"] = (sum(judged) / len(judged), len(judged))
    return means
