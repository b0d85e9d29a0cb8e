"""The groups of an iteration: their episodes, those that train, and the collectors that play them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.data.rollout.tasks import TaskStream
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.grouping import summed
from mrlm_pl.learner.credit.returns import equal_returns
from mrlm_pl.learner.ranks import all_reduce_sum
from mrlm_pl.rollout.branches import BranchRule, check_origin
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.rounds import RoundOptions, Rounds
from mrlm_pl.rollout.tree_player import TreePlayer
from mrlm_pl.seeding import derive_seed
from mrlm_pl.trainer.termination import ended_by_sigterm

T = TypeVar("T")
_Requests = Generator[list[EpisodeSpec], Sequence[Episode], T]
"""Yields the specs to be played next, and receives their episodes."""

PlaySpecs = Callable[[Sequence[EpisodeSpec]], Awaitable[Sequence[Any]]]
"""Returns an episode for each spec, or the paths of its turn tree."""

FailedMembers = Literal["shrink", "drop", "resample"]


@dataclass(frozen=True)
class GroupPlan:
    """Plan of the episodes of every group, as a function of the position alone, and the rules for failures.

    Args:
        tasks: stream of the tasks.
        groups: number of groups in an iteration, over all ranks.
        group_sizes: number of episodes in a group, by environment.
        seed: seed of all sampling.
        resample_rounds: maximum number of other tasks that replace the task of a group without a signal.
        failed_members: ``shrink`` leaves failed episodes out, and the group if fewer than ``smallest_group`` remain;
            ``drop`` leaves the whole group out; ``resample`` plays other episodes in their place, then shrinks.
        member_rounds: maximum number of rounds in which ``resample`` replaces episodes.
        smallest_group: smallest number of episodes that the algorithm can compare.
        lacks_signal: function that returns whether a group carries no learning signal.
        trees: whether the episodes are the paths of a turn tree. Paths share decisions, so ``resample`` plays the whole
            tree again.
        branch_rule: rule that adds branch episodes to each group; None adds none.
    """

    tasks: TaskStream
    groups: int
    group_sizes: Mapping[str, int]
    seed: int
    resample_rounds: int = 0
    failed_members: FailedMembers = "shrink"
    member_rounds: int = 2
    smallest_group: int = 1
    lacks_signal: Callable[[Sequence[Episode]], bool] = equal_returns
    trees: bool = False
    branch_rule: BranchRule | None = None

    def specs(self, iteration: int, group: int, attempt: int = 0) -> list[EpisodeSpec]:
        """Return the episodes of a group; ``attempt`` counts its tasks from 0."""
        task = self.tasks.attempt(iteration * self.groups + group, attempt, self.resample_rounds + 1)
        name = f"{iteration}-{group}" + (f".{attempt}" if attempt else "")
        key = (iteration, group, attempt) if attempt else (iteration, group)
        return [
            EpisodeSpec(
                id=f"{name}-{member}",
                task=task,
                group=name,
                seed=derive_seed("episode", self.seed, *key, member),
                iteration=iteration,
            )
            for member in range(self.group_sizes[task.environment])
        ]

    def root(self, iteration: int, group: int, attempt: int = 0) -> EpisodeSpec:
        """Return the root of a group's turn tree."""
        first = self.specs(iteration, group, attempt)[0]
        return replace(first, id=first.group)

    def greedy(self, iteration: int, group: int) -> EpisodeSpec:
        """Return the greedy episode of a group's first task."""
        return replace(self.root(iteration, group), id=f"{iteration}-{group}-greedy")

    def made_with(self) -> dict[str, str]:
        """Return the options that decide which episodes a group has, as text by name."""
        return {
            "data.environment": repr(self.tasks.shares),
            "data.groups": repr(self.groups),
            "data.group_size": repr(dict(self.group_sizes)),
            "data.failed_members": repr((self.failed_members, self.member_rounds)),
            "data.resample_rounds": repr(self.resample_rounds),
            "data.seed": repr(self.seed),
        }


class UnfinishedGroup:
    """One group of an iteration during play; it is played again with another task as long as it carries no signal.

    Args:
        plan: plan of the episodes, with the rules for failed ones.
        iteration: index of the group's iteration.
        group: index of the group in the iteration.

    Attributes:
        due: episodes to play next, or the root of a turn tree; empty when the group is complete.
        collected: played episodes; the whole group when it is complete.
    """

    def __init__(self, plan: GroupPlan, iteration: int, group: int) -> None:
        self.collected = Collected()
        self._requests = self._until_complete(plan, iteration, group)
        self.due = next(self._requests)

    def take(self, episodes: Sequence[Episode]) -> None:
        """Add the episodes that were due, and decide which ones come next.

        Raises:
            EnvironmentContractError: an episode differs from its origin before it branches.
        """
        self.due = self._requests.send(episodes)

    def _until_complete(self, plan: GroupPlan, iteration: int, group: int) -> _Requests[None]:
        """Yield the episodes that are due until the group is complete."""
        collected, resampled = self.collected, 0
        for attempt in range(plan.resample_rounds + 1):
            collected.replaced += excluded(collected.episodes, "replaced")
            specs = [plan.root(iteration, group, attempt)] if plan.trees else plan.specs(iteration, group, attempt)
            collected.episodes = [*(yield specs)]
            if plan.failed_members == "resample":
                resampled += yield from self._resample_failed(plan, specs)
            failed = sum(episode.failed for episode in collected.episodes)
            few = len(collected.episodes) - failed < plan.smallest_group
            left_out = few or (plan.failed_members == "drop" and failed > 0)
            members = [*collected.episodes]
            if plan.branch_rule is not None and not left_out:
                members += yield from self._play_branches(plan.branch_rule)
            if attempt == plan.resample_rounds or not (left_out or plan.lacks_signal(members)):
                break
        collected.counts = {
            "resampled_groups": float(attempt),
            "resampled_members": float(resampled),
            "dropped_groups": float(left_out),
        }
        if left_out:
            collected.replaced += excluded(collected.episodes, "left_out")
            collected.episodes = []
        yield []

    def _resample_failed(self, plan: GroupPlan, specs: Sequence[EpisodeSpec]) -> _Requests[int]:
        """Yield replacements of failed episodes, or a whole new tree; return the number of failures."""
        collected, resampled = self.collected, 0
        for number in range(1, plan.member_rounds + 1):
            failed = [index for index, episode in enumerate(collected.episodes) if episode.failed]
            if not failed:
                break
            resampled += len(failed)
            # Each round has its own seed.
            replacements = yield [
                replace(spec, id=f"{spec.id}+{number}", seed=derive_seed("another", spec.seed, number))
                for spec in (specs if plan.trees else [specs[index] for index in failed])
            ]
            if plan.trees:
                collected.replaced += excluded(collected.episodes, "replaced")
                collected.episodes = [*replacements]
                continue
            collected.replaced += excluded([collected.episodes[index] for index in failed], "replaced")
            for index, episode in zip(failed, replacements, strict=True):
                collected.episodes[index] = episode
        return resampled

    def _play_branches(self, rule: BranchRule) -> _Requests[list[Episode]]:
        """Yield the branch episodes, round after round, and return them."""
        collected, members, rounds = self.collected, [*self.collected.episodes], 0
        while specs := rule.due(members, rounds):
            branches = yield [*specs]
            origins = {episode.id: episode for episode in members}
            for branch in branches:
                if branch.origin is not None and not branch.failed:
                    check_origin(origins[branch.origin.episode], branch)
            collected.branches += branches
            members += branches
            rounds += 1
        return members[len(collected.episodes) :]


@dataclass
class Collected:
    """The episodes of one group or of several.

    Args:
        episodes: ordinary episodes that train, group after group.
        replaced: played episodes that others replaced or that are left out.
        greedy: one greedy episode for each group, if the algorithm compares with them.
        branches: branch episodes of the groups, and of replaced ones.
        counts: numbers of ``resampled_groups``, ``resampled_members`` and ``dropped_groups``.
        metrics: (sum, count) of the means to log, by name.
        sums: numbers to log as sums over all ranks, by name.
        seconds: duration of playing the episodes; None is the time that collecting them took.
        earlier_tokens: number of tokens that were sampled in these seconds for earlier collections.
    """

    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    greedy: list[Episode] = field(default_factory=list)
    branches: list[Episode] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    earlier_tokens: float = 0.0

    def add(self, other: Collected) -> None:
        """Append the episodes of another part of the collection."""
        self.episodes += other.episodes
        self.replaced += other.replaced
        self.greedy += other.greedy
        self.branches += other.branches
        self.counts = summed([*self.counts.items(), *other.counts.items()])

    @property
    def played(self) -> list[Episode]:
        """Return all episodes in the order of the files; those that are not trained on have the reason."""
        groups = {episode.group for episode in self.episodes}
        branches = [
            branch if branch.group in groups else replace(branch, excluded="replaced") for branch in self.branches
        ]
        return [*self.episodes, *self.replaced, *excluded(self.greedy, "greedy"), *branches]

    @property
    def training(self) -> list[Episode]:
        """Episodes that train: the ordinary ones, then the branches of their groups."""
        groups = {episode.group for episode in self.episodes}
        return [*self.episodes, *(branch for branch in self.branches if branch.group in groups)]

    def put_training(self, episodes: Sequence[Episode]) -> None:
        """Replace the records of :attr:`training`, in its order."""
        by_id = {episode.id: episode for episode in episodes}
        self.episodes = [by_id[episode.id] for episode in self.episodes]
        self.branches = [by_id.get(episode.id, episode) for episode in self.branches]

    def to_plain(self) -> list[Any]:
        """Return the groups as plain values for a checkpoint."""
        episode_lists = (self.episodes, self.replaced, self.greedy, self.branches)
        return [self.counts, *([episode.to_json() for episode in episode_list] for episode_list in episode_lists)]

    @classmethod
    def from_plain(cls, counts: Mapping[str, float], *episode_texts: Sequence[str]) -> Collected:
        """Restore the value of :meth:`to_plain`."""
        episodes, replaced, greedy, branches = ([Episode.from_json(text) for text in texts] for texts in episode_texts)
        return cls(episodes, replaced, greedy, branches, dict(counts))


def excluded(episodes: Sequence[Episode], reason: str) -> list[Episode]:
    """Return the episodes marked with the reason for their exclusion from training."""
    return [replace(episode, excluded=reason) for episode in episodes]


def _greedy(sampling: Sampling) -> Sampling:
    return sampling.for_all(temperature=0.0, top_p=1.0, top_k=0)


@dataclass(eq=False, repr=False)  # some fields come later
class Collector:
    """Plays the episodes that are due in groups, in lockstep: all decisions of a wave in one engine call.

    Args:
        players: players of the run.
        plan: plan of the episodes.
        sampling: sampling settings of the turns.

    Attributes:
        episode_players: players that have been made.
        training_player: player of the episodes that train.
        play_specs: function that plays the due specs of a group, or the turn trees of their roots if the algorithm
            trains on them.
        play_greedy_specs: function that plays the greedy episode of each group, if the algorithm compares with it.
    """

    players: Players
    plan: GroupPlan
    sampling: Sampling
    episode_players: Sequence[EpisodePlayer] = field(default=(), init=False)
    training_player: EpisodePlayer = field(init=False)
    play_specs: PlaySpecs = field(init=False)
    play_greedy_specs: PlaySpecs | None = field(default=None, init=False)

    def make_players(self, **options: Any) -> None:
        """Make the players, with options of :meth:`Players.player`."""
        learner, sampling = self.players.learner, self.sampling
        training = self.training_player = self.players.player(sampling, with_snapshots=True, **options)
        self.episode_players = [training]
        if learner.uses_greedy_baseline:
            greedy = self.players.player(_greedy(sampling), **options)
            self.play_greedy_specs = greedy.play
            self.episode_players = [training, greedy]
        branching = learner.unit.branching
        player = TreePlayer(training, branching, self.plan.group_sizes) if branching else training
        self.play_specs = player.play

    def resample(self, sampling: Sampling) -> None:
        """Play with other sampling settings, from the next episode on; none may be playing.

        Raises:
            ConfigurationError: episodes play between rollouts.
        """
        self.players.resample({_greedy(self.sampling): _greedy(sampling), self.sampling: sampling})
        self.sampling = sampling

    def wrap_play(self, wrapper: Callable[[PlaySpecs], PlaySpecs]) -> None:
        """Play all episodes from now on through the function that ``wrapper`` returns."""
        self.play_specs = wrapper(self.play_specs)
        self.play_greedy_specs = self.play_greedy_specs and wrapper(self.play_greedy_specs)

    async def play_due(self, unfinished: Sequence[UnfinishedGroup]) -> None:
        """Play the episodes that are due in these groups once, and add them."""
        played = iter(await self.play_specs([spec for group in unfinished for spec in group.due]))
        for group in unfinished:
            group.take(next(played) if self.plan.trees else [next(played) for _ in group.due])

    async def play_greedy(self, iteration: int, groups: Sequence[int]) -> list[Episode]:
        """Return the greedy episode of each group; none where the algorithm does not use them."""
        if self.play_greedy_specs is None:
            return []
        return list(await self.play_greedy_specs([self.plan.greedy(iteration, group) for group in groups]))

    def state(self) -> dict[str, Any] | None:
        """Return the groups that are played ahead, for a checkpoint; None without any."""
        return None

    def close(self) -> None:
        """Stop all episodes; may be called twice."""


@dataclass(eq=False, repr=False)
class SyncCollector(Collector):
    """Plays all groups of an iteration in parallel, with the current weights.

    Args:
        players, plan, sampling: see :class:`Collector`.
        rounds: options of playing in rounds; see :class:`~mrlm_pl.rollout.rounds.RoundOptions`. None plays in lockstep.
    """

    rounds: RoundOptions | None = None

    def collect(self, iteration: int, last: int, groups: Sequence[int]) -> Collected:
        """Return the episodes of these groups of an iteration; every rank calls it, with its own groups.

        Raises:
            SIGTERMException: SIGTERM interrupted a rank; all ranks raise it.
        """
        trainer = self.players.learner.trainer
        if not self.episode_players:
            self.make_players()
        collected = Collected()

        async def play_greedy() -> None:
            collected.greedy = await self.play_greedy(iteration, groups)

        stopped = self.play_greedy_specs is not None and not self._play(play_greedy)
        unfinished = [UnfinishedGroup(self.plan, iteration, group) for group in groups]
        while True:
            due = [group for group in unfinished if group.due]
            groups_left = all_reduce_sum(trainer, torch.tensor(math.inf if stopped else float(len(due))))
            if math.isinf(groups_left):
                raise SIGTERMException
            if not groups_left:
                break  # as long as one rank plays, all gather the weights
            stopped = not self._play(partial(self.play_due, due))
        for group in unfinished:
            collected.add(group.collected)
        return collected

    def _play(self, play: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Play a coroutine with the current weights; return False if SIGTERM has interrupted it.

        It interrupts the playing alone: all ranks gather the weights together, so that none may leave in between.
        """
        try:
            with self.players.published(), ended_by_sigterm(self.players.learner.trainer, apart=True):
                # Only now, as a loaded engine knows whether it takes chunks.
                if self.rounds is not None and not isinstance(self.training_player.engine, Rounds):
                    rounds = Rounds(self.players.engine, self.rounds)
                    for player in self.episode_players:
                        player.engine = rounds
                        player.call = partial(rounds.call, player.caller)
                    self.wrap_play(rounds.apart)
                self.training_player.run_blocking(play)
        except SIGTERMException:
            return False
        return True
