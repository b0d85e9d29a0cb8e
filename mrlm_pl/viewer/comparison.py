"""Two runs: which settings differ, and how much their rewards differ task by task."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.comparison import compare
from mrlm_pl.evaluation.intervals import mean_interval
from mrlm_pl.grouping import grouped
from mrlm_pl.viewer.episode_index import NEWEST
from mrlm_pl.viewer.records import Summary
from mrlm_pl.viewer.runs import Run

MOST = 500
"""Maximum number of rows of a table."""


def compare_runs(one: Run, other: Run, shown_ids: Sequence[Container[str]] | None = None) -> dict[str, Any]:
    """Return the settings, evaluations, tasks, and episodes of the same task and seed in which two runs differ.

    Args:
        one: first run.
        other: run to compare it with.
        shown_ids: ids of each run's episodes that a page can show as a pair; None for all. Tasks are compared over all
            episodes.
    """
    tables = [run.index.table() for run in (one, other)]
    own_episodes, other_episodes = map(_episodes, tables)
    own_rewards, other_rewards = _task_rewards(own_episodes), _task_rewards(other_episodes)
    rows = [(task, reward, other_rewards[task]) for task, reward in own_rewards.items() if task in other_rewards]
    rows.sort(key=lambda row: -abs(row[1] - row[2]))
    groups = {row.task: row.group for row in own_episodes}  # of an evaluation's tasks, those of one problem
    differences = list(grouped((groups[task], first - second) for task, first, second in rows).values())
    other_by_seed = {(row.task, row.seed): row for row in other_episodes}
    pairs = [
        {"task": row.task, "ids": [row.id, match.id], "rewards": [row.reward, match.reward]}
        for row in own_episodes
        if (match := other_by_seed.get((row.task, row.seed))) is not None
    ]
    shown = [pair for pair in pairs if shown_ids is None or all(map(operator.contains, shown_ids, pair["ids"]))]
    count = len(rows) or 1
    return {
        "settings": _differing_settings(one.settings(), other.settings()),
        "evaluations": _evaluations(one.reports(), other.reports()),
        "tasks": len(rows),
        "own": math.fsum(row[1] for row in rows) / count,
        "theirs": math.fsum(row[2] for row in rows) / count,
        "difference": math.fsum(value for group in differences for value in group) / count,
        "ci95": mean_interval(differences) if differences else None,
        "rows": rows[:MOST],
        "pairs": shown[:MOST],
        "pairs_left_out": len(pairs) - len(shown),
        "newest": NEWEST if any(table["more"] for table in tables) else None,
    }


def _episodes(table: Mapping[str, Any]) -> list[Summary]:
    """Return the summaries in a table without failures, branches and greedy baselines.

    Replaced episodes count: without them, the mean of a task would be that of its groups with a signal.
    """
    return [row for row in table["rows"] if row.error is None and not row.branch and row.excluded != "greedy"]


def _task_rewards(episodes: list[Summary]) -> dict[str, float]:
    rewards = grouped((row.task, row.reward) for row in episodes)
    return {task: math.fsum(rewards[task]) / len(rewards[task]) for task in sorted(rewards, key=by_number)}


def by_number(name: str) -> list[str | int]:
    """Return a key that sorts names by the numbers in them.

    >>> sorted(["math/10", "math/9"], key=by_number)
    ['math/9', 'math/10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _differing_settings(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [name, _plain_value(own.get(name)), _plain_value(other.get(name))]
        for name in sorted({*own, *other})
        if str(own.get(name)) != str(other.get(name))
    ][:MOST]


def _plain_value(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)[:200]


def _evaluations(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    comparisons = []
    for name in own:
        if name in other:
            try:
                comparisons.append({"environment": name, **asdict(compare(own[name], other[name]))})
            except (ConfigurationError, KeyError, TypeError) as error:
                comparisons.append({"environment": name, "reason": str(error)})
    return comparisons
