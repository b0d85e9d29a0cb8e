"""Rewards for the influence of the turns of a discussion, read from the record of an episode."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from mrlm_pl.episode import Episode, Trajectory, Turn, base_agent
from mrlm_pl.errors import DataError
from mrlm_pl.rewards import INCENTIVES, Horizon, RewardShare, incentive_signs, incentives, influence_rewards

SCORE = "score"
"""Reward component that is the score of an answer."""
CONSENSUS = "consensus"
"""Reward component for turns that an early consensus leaves unplayed; ``R`` is a mean over the played ones."""
Sums = dict[str, tuple[float, float]]
"""(sum, count) of each mean that is logged, by name."""


def with_influence(
    episode: Episode, gamma: float, reward: RewardShare, horizon: Horizon, amounts: Mapping[str, float]
) -> tuple[Episode, Sums]:
    """Return the episode with new rewards of its turns, and sums for the log.

    The rewards are ``R(t, a)``, incentives, and the other components of a turn except ``consensus``. A turn's future is
    in its own reward, so a truncated episode counts as terminated. A turn without a score (a tool call, say) keeps its
    reward and is not in the score table. All turns keep theirs in an episode that was truncated before any answer was
    scored, such as one whose question fills the context window.

    Args:
        episode: episode that did not fail.
        gamma, reward, horizon: see :func:`mrlm_pl.rewards.influence_rewards`.
        amounts: amount of each kind of incentive; see :func:`mrlm_pl.rewards.incentives`.

    Raises:
        DataError: no turn of an episode that ended has a score, a score is out of its range, or a person answered
            twice in one turn.
    """
    if episode.truncated and not _scored_turns(episode):
        return dataclasses.replace(episode, truncated=False), {}
    table, numbers = scores_of(episode), turn_numbers(episode)
    try:
        rewards = influence_rewards(table, gamma, reward, horizon)
        bonuses, ties = incentives(table, **amounts)
        signs, _ = incentive_signs(table)
    except ValueError as error:
        raise DataError(f"episode {episode.id!r}: {error}") from error

    def rewarded(turn: Turn) -> Turn:
        if SCORE not in turn.components:
            return turn
        index, person = numbers[turn.agent, turn.index] - 1, base_agent(turn.agent)
        components = {
            "influence": rewards[index][person],
            "incentives": bonuses[index][person],
            "unshared": turn.reward - turn.components[SCORE] - turn.components.get(CONSENSUS, 0.0),
        }
        return dataclasses.replace(turn, reward=sum(components.values()), components=components)

    answers = [signs_of_agent for turn in signs for signs_of_agent in turn.values()]
    sums: Sums = {"ties": (float(ties), 1.0)}
    for kind in INCENTIVES:
        earned = amounts[kind] * sum(signs_of_agent.get(kind, 0) for signs_of_agent in answers)
        sums[f"incentive_{kind}"] = (earned, float(len(answers)))
    for number, turn in enumerate(rewards, 1):
        if turn:
            sums[f"influence/turn_{number}"] = (sum(turn.values()), float(len(turn)))
    return dataclasses.replace(episode.with_turns(rewarded), truncated=False), sums


def scores_of(episode: Episode) -> list[dict[str, float]]:
    """Return the score table of an episode: the scores of each turn of the discussion, by person.

    Raises:
        DataError: no turn has a score, or a person answered twice in one turn.
    """
    scored = _scored_turns(episode)
    if not scored:
        raise DataError(
            f"episode {episode.id!r} of environment {episode.task.environment!r} has no turn with a reward component "
            f"{SCORE!r}; use an environment that scores every answer, such as collaborative_reasoning"
        )
    numbers = turn_numbers(episode)
    table: list[dict[str, float]] = [{} for _ in range(max(numbers[turn.agent, turn.index] for turn in scored))]
    for turn in scored:
        number, person = numbers[turn.agent, turn.index], base_agent(turn.agent)
        if person in table[number - 1]:
            raise DataError(
                f"episode {episode.id!r}: {person!r} answered twice in turn {number}, the second time as "
                f"{turn.agent!r}; an agent NAME@K is to be scored once"
            )
        table[number - 1][person] = turn.components[SCORE]
    return table


def _scored_turns(episode: Episode) -> list[Turn]:
    return [turn for turn in episode.turns() if SCORE in turn.components]


def turn_numbers(episode: Episode) -> dict[tuple[str, int], int]:
    """Return the turn of the discussion, counted from 1, of each decision, by (agent, step of the environment).

    An agent ``NAME@K`` acts in turn K. A turn of another agent ends with its scored answer, so that its earlier
    decisions, such as calling a tool, are of the same turn. Without scores every decision is a turn.
    """
    numbers: dict[tuple[str, int], int] = {}
    for agent, rows in episode.trajectories.items():
        turns = sorted((turn for row in rows for turn in row.turns), key=lambda turn: turn.index)
        _, _, suffix = agent.partition("@")
        named = int(suffix) if suffix.isdigit() else 0
        scored = any(SCORE in turn.components for turn in turns)
        number = named or 1
        for turn in turns:
            numbers[agent, turn.index] = number
            number += not named and (SCORE in turn.components or not scored)
    return numbers


def learned_in(episode: Episode, turns: Collection[int]) -> Episode:
    """Return the episode with only the actions of these turns, counted from 1, in its action masks.

    The other tokens of its policies become text that they read. Call it before :func:`with_influence`: the
    scores define the turns.
    """
    numbers = turn_numbers(episode)

    def masked(row: Trajectory) -> Trajectory:
        mask = [False] * len(row.token_ids)
        for turn in row.turns:
            if numbers[turn.agent, turn.index] in turns:
                mask[turn.start : turn.stop] = row.action_mask[turn.start : turn.stop]
        logprobs = (logprob if acted else 0.0 for logprob, acted in zip(row.logprobs, mask, strict=True))
        return dataclasses.replace(row, action_mask=tuple(mask), logprobs=tuple(logprobs))

    return episode.with_rows(masked)
