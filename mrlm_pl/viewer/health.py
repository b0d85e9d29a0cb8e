"""The health of a run's newest episodes: failures, retries, phases, and turns by agent, turn and version."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from mrlm_pl.viewer.episode_index import EpisodeIndex
from mrlm_pl.viewer.records import EpisodeHead

EPISODES = 2000
ROWS = 200


def health(index: EpisodeIndex) -> dict[str, Any]:
    """Return sums over the newest episodes, and a row for each agent, turn and version, the newest version first."""
    sums: dict[str, float] = dict.fromkeys(("failed", "retries", "truncated", "restarts", "tool_failures"), 0)
    seconds: dict[str, list[float]] = defaultdict(list)
    newest: dict[int, int] = {}
    episodes: list[EpisodeHead] = []
    for head in index.newest_heads(EPISODES):
        episodes.append(head)
        sums["failed"] += head.error is not None
        sums["retries"] += head.attempts - 1
        sums["truncated"] += head.truncated
        sums["restarts"] += head.row_restarts
        sums["tool_failures"] += head.tool_failure
        for phase, value in head.timings.items():
            seconds[phase].append(value)
        versions = [turn.version for turn in head.turns()]
        newest[head.iteration] = max([newest.get(head.iteration, 0), *versions])
    cells: dict[tuple[int, str, int], list[tuple[int, int, bool]]] = defaultdict(list)
    seen: set[tuple[str, str, str, int]] = set()
    for head in episodes:
        for turn in head.turns():
            decision = (head.group, turn.node, turn.agent, turn.sample)
            if turn.node and decision in seen:  # paths of a turn tree share it
                continue
            seen.add(decision)
            stale, tokens = newest[head.iteration] - turn.version, turn.stop - turn.start
            cells[-turn.version, turn.agent, turn.index].append((stale, tokens, turn.finish_reason == "length"))
    turns = [
        [agent, index, -version, len(found), *(math.fsum(values) / len(found) for values in zip(*found, strict=True))]
        for (version, agent, index), found in sorted(cells.items())
    ]
    means = {phase: math.fsum(values) / len(values) for phase, values in seconds.items()}
    return {"episodes": len(episodes), **sums, "seconds": means, "turns": turns[:ROWS]}
