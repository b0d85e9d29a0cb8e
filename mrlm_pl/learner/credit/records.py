"""Episodes with the credit that the learner gave their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mrlm_pl.episode import Episode, Trajectory, TurnKey
from mrlm_pl.learner.batch import PolicyBatch


def credited(
    episodes: Sequence[Episode], prepared: Sequence[Episode], batches: Mapping[str, PolicyBatch]
) -> list[Episode]:
    """Return the episodes with the return, baseline and advantage of each turn that is trained on.

    The advantage is the mean over the turn's tokens. All paths of a turn tree that share a decision have its credit.

    Args:
        episodes: records to credit.
        prepared: the same episodes as the algorithm read them.
        batches: rows that the algorithm made of them, by policy.
    """
    batches = {name: rows for name, rows in batches.items() if rows.trajectories}  # pairs of answers have none
    means = {name: turn_means(rows.advantages, rows.trajectories) for name, rows in batches.items()}
    credit: dict[TurnKey, dict[str, Any]] = {}
    for name, keys in turn_keys(prepared, batches).items():
        baselines = batches[name].turn_baselines or [[(None, None)] * len(turns) for turns in keys]
        for turns in zip(keys, baselines, means[name], strict=True):
            for key, (return_, baseline), advantage in zip(*turns, strict=True):
                if key is not None and advantage is not None:
                    credit[key] = {"return_": return_, "baseline": baseline, "advantage": advantage}
    return [
        episode.with_turns(lambda turn: replace(turn, **credit.get(episode.key_of(turn), {})))  # noqa: B023 (called here)
        for episode in episodes
    ]


def without_credit(episode: Episode) -> Episode:
    """Return the episode without the learner's credit."""
    return episode.with_turns(lambda turn: replace(turn, return_=None, baseline=None, advantage=None))


def turn_keys(prepared: Sequence[Episode], batches: Mapping[str, PolicyBatch]) -> dict[str, list[list[TurnKey | None]]]:
    """Return the keys of the turns of each row, by policy.

    A turn is found by its identity or, where an algorithm has changed its rewards, by its trajectory's tokens. The key
    is None if both are new.

    Args:
        prepared: episodes as the algorithm read them.
        batches: rows that the algorithm made of them, by policy.
    """
    by_identity: dict[int, TurnKey] = {}
    by_tokens: dict[tuple[int, int], TurnKey] = {}
    for episode in prepared:
        for row in episode.rows():
            for turn in row.turns:
                by_identity[id(turn)] = by_tokens[id(row.token_ids), turn.start] = episode.key_of(turn)
    return {
        name: [
            [by_identity.get(id(turn)) or by_tokens.get((id(row.token_ids), turn.start)) for turn in row.turns]
            for row in rows.trajectories
        ]
        for name, rows in batches.items()
        if rows.trajectories  # pairs of answers have none
    }


def turn_means(values: Tensor, rows: Sequence[Trajectory]) -> list[list[float | None]]:
    """Return for each row the means of values [B, T] over the tokens of its turns; None for turns without actions."""
    sums = values.detach().double().cumsum(1)
    return [
        [
            (float(row_sums[turn.stop - 1]) - (float(row_sums[turn.start - 1]) if turn.start else 0.0))
            / (turn.stop - turn.start)
            if any(row.action_mask[turn.start : turn.stop])
            else None
            for turn in row.turns
        ]
        for row_sums, row in zip(sums, rows, strict=True)
    ]
