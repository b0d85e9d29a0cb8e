"""Episodes of given turns, and the advantages that an algorithm gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn

Played = Sequence[tuple[str, float | Mapping[str, float]]]
"""An agent's turns: the text before each, and its reward or components."""


def episode(number: int, group: str, agents: Mapping[str, Played]) -> Episode:
    """Each turn is one observed and one sampled token."""
    rows = {}
    for agent, played in agents.items():
        parts = [part if isinstance(part, Mapping) else {"reward": part} for _, part in played]
        turns = tuple(
            Turn(agent, k, 2 * k + 1, 2 * k + 2, sum(part.values()), part, "stop", "main", 0, "e")
            for k, part in enumerate(parts)
        )
        said = [m for text, _ in played for m in (Message("user", text), Message("assistant", "x"))]
        length = 2 * len(turns)
        mask = tuple(bool(place % 2) for place in range(length))
        ids = tuple(range(8, 8 + length))
        rows[agent] = (Trajectory(agent, "main", ids, mask, tuple(-1.0 * acts for acts in mask), turns, tuple(said)),)
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, rows, "end")


def advantages(algorithm: Any, episodes: list[Episode], trainer: Any) -> list[list[float]]:
    """Return the advantage of each turn of each trajectory."""
    algorithm.configure_model()
    algorithm.trainer = trainer
    with torch.no_grad():
        rows = algorithm.prepare(episodes, Sampling(max_tokens=8))["main"]
    assert not rows.advantages[~rows.action_mask].any()
    return [row[mask].tolist() for row, mask in zip(rows.advantages, rows.action_mask, strict=True)]


def beside_partner(episodes: Sequence[Episode], partner: str) -> list[Episode]:
    """Return the episodes with an agent that the policy ``partner`` decides for."""
    return [
        replace(
            episode,
            trajectories={
                agent: tuple(replace(row, policy="partner" if agent == partner else row.policy) for row in rows)
                for agent, rows in episode.trajectories.items()
            },
        )
        for episode in episodes
    ]
