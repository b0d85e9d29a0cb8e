"""Measures of episodes that are paths of turn trees."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mrlm_pl.episode import Episode, Trajectory, Turn, branches, decided, turn_trees

THRESHOLD_STOP, UNEXPANDED_STOP = TREE_STOPS = ("reward_threshold", "not_expanded")
"""Stop reasons of paths that the tree ended, not the environment."""


def distinct_turns(episodes: Sequence[Episode]) -> list[tuple[Turn, Trajectory]]:
    """Return every decision once, with a row that has it; paths of a turn tree share some."""
    plain = [episode for episode in episodes if not branches(episode)]
    found = [(turn, row) for episode in plain for row in episode.rows() for turn in row.turns]
    for tree in turn_trees([episode for episode in episodes if branches(episode)]).values():
        found += tree.decisions.values()
    return found


def path_weights(episodes: Sequence[Episode]) -> list[float]:
    """Return the probability of each episode when joint actions of a state are equally likely; 1 outside turn trees.

    Without them a mean over the paths would count those most that branch most. Paths that the tree did not expand,
    because another was better, have 0: their outcome is unknown.
    """
    expanded = [episode for episode in episodes if episode.stop_reason != UNEXPANDED_STOP and branches(episode)]
    weights: dict[tuple[str, str], float] = {}
    for tree in turn_trees(expanded).values():
        children = tree.children()
        for path in tree.paths:
            states = [next(iter(made.values()))[0].node for made in decided(path).values()]
            weights[path.group, path.id] = math.prod(1 / len(children[node]) for node in states)
    return [
        0.0 if episode.stop_reason == UNEXPANDED_STOP else weights.get((episode.group, episode.id), 1.0)
        for episode in episodes
    ]
