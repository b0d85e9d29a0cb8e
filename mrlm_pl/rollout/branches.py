"""Branch episodes: episodes of a group that branch from its finished ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mrlm_pl.episode import Episode, turns_by_step
from mrlm_pl.errors import EnvironmentContractError
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.replay import Rest, continued, counterfactuals
from mrlm_pl.seeding import keyed_random
from mrlm_pl.settings import PositiveInt, Settings, at_least


class BranchRule(Settings):
    """Rule that adds branch episodes to every group, round after round.

    A subclass is a frozen dataclass: its ``repr`` decides whether groups in a checkpoint are still those of the run.
    """

    @abstractmethod
    def due(self, group: Sequence[Episode], rounds: int) -> Sequence[EpisodeSpec]:
        """Return the episodes of the next round; none ends the group.

        A function of its arguments alone, as it may be called in any thread, and again after a resume.

        Args:
            group: finished episodes, the ordinary ones first; failed ones have ``error`` set.
            rounds: number of rounds already played.
        """


@dataclass(frozen=True)
class Alternatives(BranchRule):
    """Fresh samples that replace individual messages of every episode.

    Args:
        count: number of samples for each message.
        messages: number of messages of an episode to branch at, drawn with equal probability; None branches at all.
        rest: decisions after the message; see :data:`mrlm_pl.rollout.replay.Rest`.
        policies: policies whose messages are branched.

    Raises:
        ConfigurationError: a value out of range.
    """

    count: int
    messages: PositiveInt | None
    rest: Rest
    policies: tuple[str, ...]

    def __post_init__(self) -> None:
        at_least(1 if self.rest == "play" else 2).check(alternatives=self.count)

    def due(self, group: Sequence[Episode], rounds: int) -> Sequence[EpisodeSpec]:
        if rounds:
            return ()
        specs: list[EpisodeSpec] = []
        for episode in group:
            if episode.failed:
                continue
            rows = [row for row in episode.rows() if row.policy in self.policies]
            chosen = [(turn.agent, turn.index) for row in rows for turn in row.turns]
            if self.messages is not None and self.messages < len(chosen):
                chosen = keyed_random("branched", episode.seed).sample(chosen, self.messages)
            for agent, step in chosen:
                specs += counterfactuals(episode, agent, step, [None] * self.count, self.rest)
        return specs


@dataclass(frozen=True)
class Expansions(BranchRule):
    """Trees: every ordinary episode is a chain, whose states are continued to new leaves.

    A state is where a decision is due, the first one included. Each is drawn with equal probability, with replacement,
    among the distinct states of a tree.

    Args:
        rounds: number of rounds of expansion.
        nodes: number of states of each tree that are continued in a round.

    Raises:
        ConfigurationError: a value out of range.
    """

    rounds: PositiveInt
    nodes: PositiveInt

    def due(self, group: Sequence[Episode], rounds: int) -> Sequence[EpisodeSpec]:
        if rounds == self.rounds:
            return ()
        roots, steps = roots_of(group), dict[str, list[tuple[Episode, int]]]()
        for leaf in group:
            if not leaf.failed:
                last = -1 if leaf.origin is None else leaf.origin.step  # shared with the origin
                steps.setdefault(roots[leaf.id], []).extend((leaf, step) for step in turns_by_step(leaf) if step > last)
        return [
            continued(leaf, step, rounds * self.nodes + number)
            for nodes in steps.values()
            for number, (leaf, step) in enumerate(
                keyed_random("expanded", nodes[0][0].seed, rounds).choices(nodes, k=self.nodes)
            )
        ]


def roots_of(group: Sequence[Episode]) -> dict[str, str]:
    """Return the id of the ordinary episode that each episode of a group goes back to, by its id."""
    roots: dict[str, str] = {}
    for episode in group:
        roots[episode.id] = episode.id if episode.origin is None else roots[episode.origin.episode]
    return roots


def check_origin(origin: Episode, branch: Episode) -> None:
    """Validate that an episode agrees with the one that it branches from, up to the tokens before the branch.

    Raises:
        EnvironmentContractError: the same actions led to other observations.
    """
    if fault := departure(origin, branch):
        raise EnvironmentContractError(
            f"environment {branch.task.environment!r}: {fault} of episode {branch.id!r}; an algorithm that branches "
            "episodes needs an environment that is deterministic in the task"
        )


def departure(origin: Episode, branch: Episode) -> str:
    """Return where an episode departs from the one that it branches from before the branch; empty if nowhere."""
    assert branch.origin is not None
    before, after = turns_by_step(origin), turns_by_step(branch)
    for step in range(branch.origin.step + 1):
        contexts = [
            {agent: row.token_ids[: turn.start] for agent, (turn, row) in by_agent.get(step, {}).items()}
            for by_agent in (before, after)
        ]
        if contexts[0] != contexts[1]:
            return f"the same actions led to other observations at step {step}"
    return ""
