"""Credit of individual turns: their rewards and states, and the trajectories that are credited with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrlm_pl.advantages import (
    TurnBaseline,
    finite_rewards,
    group_centered_advantages,
    group_normalized_advantages,
    returns_to_go,
    state_advantages,
    turn_advantages,
)
from mrlm_pl.episode import Episode, Trajectory, Turn
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.credit.returns import (
    Batches,
    EpisodeCredit,
    acting_rows,
    credit_turns,
    group_numbers,
    labels,
    paired,
    rows_by_policy,
)
from mrlm_pl.rewards import TurnBonus
from mrlm_pl.settings import NonNegativeFloat, UnitInterval


@dataclass(frozen=True)
class TurnReturns:
    """The turns of a rollout in which agents sampled tokens: S turns in R trajectories.

    Attributes:
        reward: [S] fp64, reward of the turn, with its bonus.
        comparison: [S] int64, equal for the turns of one agent in the episodes of one task group.
        play: [S] int64, equal for the turns of one agent in one episode.
        number: [S] int64, index of the turn within its play, from 0.
        state: [S] text of the messages since the agent's last turn.
        row: [S] int64, index of the turn's trajectory.
        turn: [S] records of the turns.
        trajectory: [R] records of the trajectories.
        group: [R] int64, index of the task group in the rollout.
        episode: [R] record of the trajectory's episode.
        returns: [S] fp64, return of each turn as it is compared; initially the sum of the play's rewards from the turn
            on.
        rollout: all episodes of the rollout, failed ones included.
        baseline: [S] fp64, baselines of the returns; None if a turn takes part in several comparisons.
    """

    reward: Tensor
    comparison: Tensor
    play: Tensor
    number: Tensor
    state: tuple[str, ...]
    row: Tensor
    turn: tuple[Turn, ...]
    trajectory: tuple[Trajectory, ...]
    group: Tensor
    episode: tuple[Episode, ...]
    returns: Tensor
    rollout: Sequence[Episode]
    baseline: Tensor | None = None

    @property
    def policies(self) -> tuple[str, ...]:
        """Policy [S] of each turn."""
        return tuple(self.trajectory[row].policy for row in self.row.tolist())

    def rows(self, advantages: Tensor) -> Batches:
        """Return the trajectories of every policy, each turn's tokens with its advantage.

        Args:
            advantages: [S], one for each turn.
        """
        comparisons = torch.zeros(len(self.trajectory), dtype=torch.int64).index_copy(0, self.row, self.comparison)
        episodes = labels(map(id, self.episode))
        batches = rows_by_policy(self.trajectory, self.group.tolist(), comparisons.tolist(), episodes)
        pairs = zip(paired(self.returns, self.baseline), advantages.tolist(), strict=True)
        turns = grouped(zip(self.row.tolist(), ((*pair, advantage) for pair, advantage in pairs), strict=True))
        for policy, indices in grouped((row.policy, index) for index, row in enumerate(self.trajectory)).items():
            credit_turns(batches[policy], [turns[index] for index in indices])
        return batches


def turn_returns_of(episodes: Sequence[Episode], turn_bonus: TurnBonus = None) -> TurnReturns:
    """Return the turns of a rollout; failed episodes are left out, and their group shrinks.

    Args:
        episodes: episodes of one rollout.
        turn_bonus: function that returns a bonus for a turn, added to the environment's reward; None adds nothing.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
    """
    groups, acting = group_numbers(episodes), acting_rows(episodes)
    turns = [turn for _, row in acting for turn in row.turns]
    rewards = [turn.reward + (turn_bonus(turn) if turn_bonus else 0.0) for turn in turns]
    reward = finite_rewards(torch.tensor(rewards, dtype=torch.float64))
    rows = torch.arange(len(acting)).repeat_interleave(torch.tensor([len(row.turns) for _, row in acting]).long())
    play = torch.tensor(labels((id(episode), row.agent) for episode, row in acting)).long()[rows]
    number = torch.arange(len(turns)) - torch.searchsorted(play, play)  # less the first of the play
    return TurnReturns(
        reward=reward,
        comparison=torch.tensor(labels((episode.group, row.agent) for episode, row in acting)).long()[rows],
        play=play,
        number=number,
        state=tuple(state for _, row in acting for state in observed(row)),
        row=rows,
        turn=tuple(turns),
        trajectory=tuple(row for _, row in acting),
        group=torch.tensor([groups[episode.group] for episode, _ in acting]).long(),
        episode=tuple(episode for episode, _ in acting),
        returns=returns_to_go(reward, play, number),
        rollout=episodes,
    )


def observed(trajectory: Trajectory) -> list[str]:
    """Return, for each turn of a trajectory, the text of the messages between the agent's last turn and this one.

    >>> from mrlm_pl.episode import Message
    >>> said = [Message("user", "Begin"), Message("assistant", "a"), Message("user", "More"), Message("assistant", "b")]
    >>> turns = [Turn("x", k, 0, 0, 0.0, {}, "stop", "p", 0, "e") for k in range(2)]
    >>> observed(Trajectory("x", "p", (), (), (), tuple(turns), tuple(said)))
    ['user: Begin', 'user: More']
    """
    texts, heard = [], list[str]()
    for message in trajectory.messages:
        if message.role == "assistant":
            texts.append("\n".join(heard))
            heard = []
        else:
            heard.append(f"{message.role}: {message.content}")
    # A trajectory that a rewritten history began repeats earlier turns; without messages there are no states.
    return texts[len(texts) - len(trajectory.turns) :] if texts else [""] * len(trajectory.turns)


@dataclass(frozen=True)
class TurnCredit(EpisodeCredit[TurnReturns]):
    """Advantages of turns, within the episodes of a task and, with ``state_weight``, within equal states.

    Args:
        gamma: discount factor from turn to turn.
        baseline: baseline of a turn's return; see :data:`mrlm_pl.advantages.TurnBaseline`.
        normalize: divide by standard deviations.
        state_weight: weight of the comparison within states, beside which whole episodes are compared (GiGPO, arXiv
            2505.10978); None compares turns of the same number.
        state_key: function of a state's text that is equal for equal states; None takes the text.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    gamma: UnitInterval = 1.0
    baseline: TurnBaseline = "unbiased"
    normalize: bool = True
    state_weight: NonNegativeFloat | None = None
    state_key: Callable[[str], str] | None = None

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]) -> TurnReturns:
        return turn_returns_of(episodes, bonus)

    def with_baselines(self, turns: TurnReturns) -> TurnReturns:
        """Return the turns with their discounted returns, and with the baselines if they have a single comparison."""
        returns = returns_to_go(turns.reward, turns.play, turns.number, self.gamma)
        baseline = returns - replace(self, normalize=False).advantages(turns) if self.state_weight is None else None
        return replace(turns, returns=returns, baseline=baseline)

    def advantages(self, turns: TurnReturns) -> Tensor:
        """Return the advantage [S] fp64 of each turn."""
        if self.state_weight is None:
            return turn_advantages(
                turns.reward,
                turns.comparison,
                turns.play,
                turns.number,
                gamma=self.gamma,
                baseline=self.baseline,
                normalize=self.normalize,
            )
        first = (turns.number == 0).nonzero().flatten()  # every episode counts once among the whole ones
        episode_returns = returns_to_go(turns.reward, turns.play, turns.number)[first]
        compare = group_normalized_advantages if self.normalize else group_centered_advantages
        episode_advantages = compare(episode_returns, turns.comparison[first]).double()
        _, plays = torch.unique(turns.play, return_inverse=True)  # in ascending order, as the turns are
        returns = returns_to_go(turns.reward, turns.play, turns.number, self.gamma)
        within = state_advantages(
            returns, self._states(turns), turns.play, baseline=self.baseline, normalize=self.normalize
        )
        return episode_advantages[plays] + self.state_weight * within

    def _states(self, turns: TurnReturns) -> Tensor:
        """Return a number [S] that is equal for turns of the same agent, task group and state.

        Raises:
            DataError: a record lacks the messages that make up its states.
        """
        for episode, trajectory in zip(turns.episode, turns.trajectory, strict=True):
            if trajectory.turns and not trajectory.messages:
                raise DataError(
                    f"agent {trajectory.agent!r} of episode {episode.id!r} has turns, but no messages, and so no "
                    "states to compare turns in; keep the messages in the record, or use GRPO with `credit: turn`"
                )
        texts = turns.state if self.state_key is None else map(self.state_key, turns.state)
        return torch.tensor(labels(zip(turns.comparison.tolist(), texts, strict=True)), dtype=torch.int64)
