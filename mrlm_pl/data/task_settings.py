"""What differs between the environments of a run: how many episodes, how many turns, what a reward is worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.nearest import nearest


@dataclass(frozen=True)
class TaskSettings:
    """Settings of one environment among several; what is left out is as for all of them.

    Args:
        group_size: episodes of each task (decisions of each agent in a state of a turn tree); None is
            ``data.group_size``.
        max_turns: decisions after which an episode is cut short, in training and validation; None is
            ``data.max_turns``.
        reward_scale: factor of the rewards where they are learnt from; see :func:`worth`.

    Raises:
        ConfigurationError: a value out of range.
    """

    group_size: int | None = None
    max_turns: int | None = None
    reward_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("group_size", "max_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"data.task_settings: {name} is {value}; it must be 1 or above")
        if not (math.isfinite(self.reward_scale) and self.reward_scale > 0):
            raise ConfigurationError(
                f"data.task_settings: reward_scale is {self.reward_scale}; it must be a number above 0 (leave an "
                "environment out of the run rather than its rewards)"
            )


def check_names(what: str, given: Sequence[str], names: Sequence[str]) -> None:
    """Nothing when all given names are those of environments.

    Raises:
        ConfigurationError: one is not; the message has the nearest.
    """
    for name in given:
        if name not in names:
            near = nearest(name, names)
            hint = f"did you mean {near!r}? The" if near else "the"
            raise ConfigurationError(
                f"{what} names the environment {name!r}, which this run does not have; {hint} environments are "
                f"{list(names)}"
            )


def worth(episodes: Sequence[Episode], scales: Mapping[str, float]) -> list[Episode]:
    """The episodes as they are learnt from: every reward times the scale of its environment.

    Environments pay in units of their own. The scale is applied to what an algorithm makes its advantages, values and
    comparisons of, and to nothing else: records, files, metrics, evaluations and curricula keep the rewards that the
    environment paid, or they could not be compared between runs. What an algorithm adds itself (``overlong_buffer``,
    the divergence from the reference) is not scaled. An advantage that is divided by the spread of its group does not
    depend on the scale.

    Args:
        episodes: of any environments.
        scales: by environment; one that is missing has 1.
    """
    return [_scaled(episode, scales.get(episode.task.environment, 1.0)) for episode in episodes]


def _scaled(episode: Episode, scale: float) -> Episode:
    if scale == 1.0:
        return episode

    def row(trajectory: Trajectory) -> Trajectory:
        turns = tuple(
            dataclasses.replace(
                turn,
                reward=turn.reward * scale,
                components={name: value * scale for name, value in turn.components.items()},
            )
            for turn in trajectory.turns
        )
        return dataclasses.replace(trajectory, turns=turns)

    return dataclasses.replace(
        episode,
        trajectories={agent: tuple(map(row, rows)) for agent, rows in episode.trajectories.items()},
        step_rewards=tuple({agent: paid * scale for agent, paid in step.items()} for step in episode.step_rewards),
    )
