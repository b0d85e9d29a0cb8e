"""The rewards of a team at each step of an episode, and the decisions and observations of its agents."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import MutableSet, Sequence
from typing import Any

from mrlm_pl.episode import Episode, Message, Turn
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import grouped
from mrlm_pl.reward_models.scorer import agent_line, team_message
from mrlm_pl.rewards import TurnBonus

logger = logging.getLogger(__name__)


def decision_steps(episode: Episode) -> int:
    """Return the number of steps of the environment in which agents decided."""
    return 1 + max((turn.index for turn in episode.turns()), default=-1)


def team_rewards(episode: Episode, turn_bonus: TurnBonus = None) -> list[float]:
    """Return the mean over the agents of their rewards at each step, whether they decided or not.

    In a record without ``step_rewards`` these are the rewards of the turns of the step.

    Args:
        episode: episode that did not fail.
        turn_bonus: function that returns a bonus for a turn, added to the reward of its agent and step; None adds
            nothing.
    """
    by_step: list[list[float]] = [[] for _ in range(decision_steps(episode))]
    for step, rewards in enumerate(episode.step_rewards[: len(by_step)]):
        by_step[step] += rewards.values()
    for turn in episode.turns():
        if not episode.step_rewards:
            by_step[turn.index].append(turn.reward)
        if turn_bonus is not None:
            by_step[turn.index].append(turn_bonus(turn))
    return [math.fsum(step_rewards) / episode.team_size for step_rewards in by_step]


def has_constant_sum(episodes: Sequence[Episode]) -> bool:
    """Return whether the agents' returns sum to the same in all episodes, while an agent's own differ between episodes.

    The team's return then never differs, as in a zero-sum game. Failed episodes do not count.
    """
    returns = [_returns(episode) for episode in episodes if not episode.failed and len(episode.trajectories) > 1]
    sums = [math.fsum(by_agent.values()) for by_agent in returns]
    if not sums or max(sums) - min(sums) > 1e-9 * max(1.0, *map(abs, sums)):
        return False
    return len({tuple(sorted(by_agent.items())) for by_agent in returns}) > 1


def _returns(episode: Episode) -> dict[str, float]:
    """Return each agent's return, with its rewards at steps in which others decided."""
    rewards_by_agent = grouped(pair for rewards in episode.step_rewards for pair in rewards.items())
    return {agent: math.fsum(rewards) for agent, rewards in rewards_by_agent.items()} or episode.rewards()


def warn_of_constant_sum(episodes: Sequence[Episode], remedy: str, warned: MutableSet[Any]) -> None:
    """Log once that a team's return carries no signal where the rewards have a constant sum.

    Args:
        episodes: episodes of one rollout.
        remedy: change that the warning suggests.
        warned: names of earlier warnings; this adds to them.
    """
    if "constant sum" not in warned and has_constant_sum(episodes):
        warned.add("constant sum")
        logger.warning(
            "in all episodes of this rollout the agents' rewards sum to the same, as in a zero-sum game: the return of "
            "the team never differs, so all advantages of the team's reward are 0; %s",
            remedy,
        )


def with_team_rewards(episode: Episode) -> Episode:
    """Return the episode with each agent's own rewards replaced by the team's.

    A turn has those from its step until the agent's next turn. Rewards before an agent's first turn are on no turn.
    """
    if episode.failed:
        return episode
    earned, rewards = team_rewards(episode), dict[tuple[str, int], float]()
    for agent, rows in episode.trajectories.items():
        starts = [turn.index for row in rows for turn in row.turns]
        for start, end in zip(starts, [*starts[1:], len(earned)], strict=True):
            rewards[agent, start] = math.fsum(earned[start:end])

    def rewarded(turn: Turn) -> Turn:
        reward = rewards[turn.agent, turn.index]
        return dataclasses.replace(turn, reward=reward, components={"team": reward})

    return episode.with_turns(rewarded)


def joint_history(episode: Episode) -> list[str]:
    """Return the new messages of all conversations before each step, and after the last one: steps + 1 texts.

    Each message begins with a line ``[agent] role: text``. Before a step come first the replies of the step before,
    then what its agents are shown; an environment shows it to those that are to decide next.

    Raises:
        DataError: the record lacks the agents' messages.
    """
    replies, shown = _messages_by_step(episode)
    return [
        "\n".join(
            agent_line(agent, message)
            for by_agent in messages_of_step
            for agent, messages in by_agent.items()
            for message in messages
        )
        for messages_of_step in zip(replies, shown, strict=True)
    ]


def joint_conversation(episode: Episode) -> list[Message]:
    """Return the conversation of the team: for each step a user's message with the observations, and the joint action.

    Raises:
        DataError: the record lacks the agents' messages.
    """
    replies, shown = _messages_by_step(episode)
    steps = zip(shown[:-1], replies[1:], strict=True)
    return [
        message
        for observations, actions in steps
        for message in (team_message("user", observations), team_message("assistant", actions))
    ]


def _messages_by_step(episode: Episode) -> tuple[list[dict[str, list[Message]]], list[dict[str, list[Message]]]]:
    """Return by agent the replies of the step before, and the other messages before each step and after the last."""
    steps = decision_steps(episode)
    replies_by_step: list[dict[str, list[Message]]] = [{} for _ in range(steps + 1)]
    shown: list[dict[str, list[Message]]] = [{} for _ in range(steps + 1)]
    for agent, rows in episode.trajectories.items():
        indices = [turn.index for row in rows for turn in row.turns]
        messages = rows[-1].messages  # where a template rewrote history, the last row has all of it
        replies = [message_index for message_index, message in enumerate(messages) if message.role == "assistant"]
        if len(replies) < len(indices):
            raise DataError(
                f"episode {episode.id!r}: agent {agent!r} decided {len(indices)} times, but its record holds "
                f"{len(replies)} replies; the joint conversation is made of the messages, so keep them in the record"
            )
        # Replies beyond its own are examples in the first prompt.
        steps_of_replies = dict(zip(replies[len(replies) - len(indices) :], indices, strict=True))
        step = indices[0]
        for message_index, message in enumerate(messages):
            if message_index in steps_of_replies:
                replies_by_step[steps_of_replies[message_index] + 1].setdefault(agent, []).append(message)
                step = min((index for index in indices if index > steps_of_replies[message_index]), default=steps)
            else:
                shown[step].setdefault(agent, []).append(message)
    return replies_by_step, shown
