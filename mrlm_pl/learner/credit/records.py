"""Episodes with the credit that the learner gave their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from mrlm_pl.episode import Episode, Trajectory, Turn
from mrlm_pl.learner.batch import PolicyBatch

Credit = tuple[float, float | None]
"""Advantage and baseline of a turn."""


def credited(
    episodes: Sequence[Episode], prepared: Sequence[Episode], tables: Mapping[str, PolicyBatch]
) -> list[Episode]:
    """Return the episodes with the advantage of each turn that is trained on, and the critic's baseline if any.

    Both are means over the turn's tokens. A decision that several paths of a turn tree share has them in all paths. A
    turn is found by its identity or, where an algorithm has changed its rewards, by its trajectory's tokens.

    Args:
        episodes: the records.
        prepared: the same episodes, as the algorithm read them.
        tables: the rows that the algorithm made of them, by policy.
    """
    of_turns: dict[int, Credit] = {}
    of_spans: dict[tuple[int, int], Credit] = {}
    for rows in tables.values():
        advantages, values = _running_sums(rows.advantages), _running_sums(rows.values)
        for place, trajectory in enumerate(rows.trajectories):
            for turn in trajectory.turns:
                advantage = _mean(advantages, place, turn)
                if advantage is not None:
                    credit = advantage, _mean(values, place, turn)
                    of_turns[id(turn)] = of_spans[id(trajectory.token_ids), turn.start] = credit
    shared = {
        _key(episode, turn): of_turns[id(turn)]
        for episode in prepared
        for row in episode.rows()
        for turn in row.turns
        if turn.node and id(turn) in of_turns
    }

    def credit_of(episode: Episode, row: Trajectory, turn: Turn) -> Credit | None:
        own = of_turns.get(id(turn)) or of_spans.get((id(row.token_ids), turn.start))
        return own or (shared.get(_key(episode, turn)) if turn.node else None)

    def with_credit(episode: Episode, read: Episode) -> Episode:
        rows = {}
        for agent, trajectories in episode.trajectories.items():
            rows[agent] = tuple(
                replace(
                    row,
                    turns=tuple(
                        _with(turn, credit_of(read, other, same))
                        for turn, same in zip(row.turns, other.turns, strict=True)
                    ),
                )
                for row, other in zip(trajectories, read.trajectories[agent], strict=True)
            )
        return replace(episode, trajectories=rows)

    return [with_credit(episode, read) for episode, read in zip(episodes, prepared, strict=True)]


def _key(episode: Episode, turn: Turn) -> tuple[str, str, str, int]:
    return episode.group, turn.node, turn.agent, turn.sample


def _with(turn: Turn, credit: Credit | None) -> Turn:
    return turn if credit is None else replace(turn, advantage=credit[0], baseline=credit[1])


def _running_sums(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.detach().double().cumsum(1).cpu()


def _mean(sums: Tensor | None, place: int, turn: Turn) -> float | None:
    """Return the mean over a turn's tokens of a table, given its running sums."""
    if sums is None or turn.stop <= turn.start:
        return None
    before = float(sums[place, turn.start - 1]) if turn.start else 0.0
    return (float(sums[place, turn.stop - 1]) - before) / (turn.stop - turn.start)
