"""The health of a run's newest episodes: failures, retries, phases, and turns by agent, turn and version."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from mrlm_pl.grouping import grouped
from mrlm_pl.viewer.episode_index import EpisodeIndex

EPISODES = 2000
ROWS = 200


def health(index: EpisodeIndex) -> dict[str, Any]:
    """Return sums over the newest episodes, and a row for each agent, turn and version, the newest version first."""
    episodes = list(index.newest_heads(EPISODES))
    newest: dict[int, int] = {}
    for head in episodes:
        newest[head.iteration] = max([newest.get(head.iteration, 0), *(turn.version for turn in head.turns())])
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
        [agent, index, -version, len(cell), *(math.fsum(values) / len(cell) for values in zip(*cell, strict=True))]
        for (version, agent, index), cell in sorted(cells.items())
    ]
    seconds = grouped(phase for head in episodes for phase in head.timings.items())
    return {
        "episodes": len(episodes),
        "failed": sum(head.error is not None for head in episodes),
        "retries": sum(head.attempts - 1 for head in episodes),
        "truncated": sum(head.truncated for head in episodes),
        "restarts": sum(head.row_restarts for head in episodes),
        "tool_failures": sum(head.tool_failure for head in episodes),
        "seconds": {phase: math.fsum(values) / len(values) for phase, values in seconds.items()},
        "turns": turns[:ROWS],
    }
