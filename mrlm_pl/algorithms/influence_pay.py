"""What the turns of a discussion are paid for their influence, read from the record of an episode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from mrlm_pl.episode import Episode, Trajectory, Turn, person_of
from mrlm_pl.errors import DataError
from mrlm_pl.rewards import INCENTIVES, Horizon, Share, incentive_signs, incentives, influence_rewards

SCORE = "score"
"""The component of a reward that is the score of an answer."""
Sums = dict[str, tuple[float, float]]
"""(sum, count) of what is logged as a mean, by name."""


@dataclass(frozen=True)
class InfluencePay:
    """Pays every turn of an episode ``R(t, a)``, its incentives and all that it earned beside its score.

    Args:
        gamma, share, horizon: see :func:`mrlm_pl.rewards.influence_rewards`.
        amounts: of the incentives, by kind; see :func:`mrlm_pl.rewards.incentives`.
    """

    gamma: float
    share: Share
    horizon: Horizon
    amounts: Mapping[str, float]

    def paid(self, episode: Episode) -> tuple[Episode, Sums]:
        """The episode with its turns paid anew, and sums for the log; each turn's future is then in its own reward.

        So the episode counts as one that ended, also where a limit cut it short. A turn without a score (the call of a
        tool, say) keeps its reward and is no part of the table.

        Args:
            episode: one that did not fail.

        Raises:
            DataError: no turn has a score, a score is out of its range, or a person answered twice at one step.
        """
        table = scores_of(episode)
        try:
            rewards = influence_rewards(table, self.gamma, self.share, self.horizon)
            pay, ties = incentives(table, **self.amounts)
            signs, _ = incentive_signs(table)
        except ValueError as error:
            raise DataError(f"episode {episode.id!r}: {error}") from error

        def repaid(turn: Turn) -> Turn:
            if SCORE not in turn.components:
                return turn
            person = person_of(turn.agent)
            parts = {
                "influence": rewards[turn.index][person],
                "incentives": pay[turn.index][person],
                "unshared": turn.reward - turn.components[SCORE],
            }
            return dataclasses.replace(turn, reward=sum(parts.values()), components=parts)

        answers = [found for turn in signs for found in turn.values()]
        sums: Sums = {"ties": (float(ties), 1.0)}
        for kind in INCENTIVES:
            earned = self.amounts[kind] * sum(found.get(kind, 0) for found in answers)
            sums[f"incentive_{kind}"] = (earned, float(len(answers)))
        for number, turn in enumerate(rewards, 1):
            if turn:
                sums[f"influence/turn_{number}"] = (sum(turn.values()), float(len(turn)))
        return dataclasses.replace(_with_turns(episode, repaid), truncated=False), sums


def scores_of(episode: Episode) -> list[dict[str, float]]:
    """The score table of an episode: the scores of each step of the environment, by person.

    Raises:
        DataError: no turn has a score, or a person answered twice at one step.
    """
    turns = [turn for row in episode.rows() for turn in row.turns]
    if not any(SCORE in turn.components for turn in turns):
        raise DataError(
            f"episode {episode.id!r} of environment {episode.task.environment!r} has no turn with a reward component "
            f"{SCORE!r}; use an environment that scores every answer, such as collaborative_reasoning"
        )
    table: list[dict[str, float]] = [{} for _ in range(1 + max(turn.index for turn in turns))]
    for turn in turns:
        person = person_of(turn.agent)
        if SCORE in turn.components:
            if person in table[turn.index]:
                raise DataError(
                    f"episode {episode.id!r}: {person!r} answered twice at step {turn.index}, the second time as "
                    f"{turn.agent!r}; agents that act at the same time need names that differ before the @"
                )
            table[turn.index][person] = turn.components[SCORE]
    return table


def learnt_in(episode: Episode, turns: Collection[int]) -> Episode:
    """The episode with only the actions of these turns, counted from 1, in its action masks.

    What else its policies said becomes text that they read.
    """

    def masked(row: Trajectory) -> Trajectory:
        mask = [False] * len(row.token_ids)
        for turn in row.turns:
            if turn.index + 1 in turns:
                mask[turn.start : turn.stop] = row.action_mask[turn.start : turn.stop]
        logprobs = (logprob if acted else 0.0 for logprob, acted in zip(row.logprobs, mask, strict=True))
        return dataclasses.replace(row, action_mask=tuple(mask), logprobs=tuple(logprobs))

    return _with_rows(episode, masked)


def _with_turns(episode: Episode, change: Callable[[Turn], Turn]) -> Episode:
    return _with_rows(episode, lambda row: dataclasses.replace(row, turns=tuple(map(change, row.turns))))


def _with_rows(episode: Episode, change: Callable[[Trajectory], Trajectory]) -> Episode:
    return dataclasses.replace(
        episode, trajectories={agent: tuple(map(change, rows)) for agent, rows in episode.trajectories.items()}
    )
