"""The groups of an iteration: their episodes, those that train, and the collectors that play them."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.data.rollout.tasks import TaskStream
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.grouping import summed
from mrlm_pl.learner.credit.returns import equal_returns
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.rollout.branches import FurtherEpisodes, check_origin
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.rounds import CallerInRounds, PlayerInRounds, RoundOptions, Rounds
from mrlm_pl.rollout.tree_player import TreePlayer
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import at_least, one_of
from mrlm_pl.trainer.termination import leaving_at_sigterm

T = TypeVar("T")
FailedMembers = Literal["shrink", "drop", "resample"]


@dataclass
class GroupPlan:
    """The episodes of every group of every iteration, as a function of the position alone, and the rules for failures.

    Args:
        tasks: where tasks are drawn.
        groups: in an iteration, over all ranks.
        group_sizes: episodes of each, by environment.
        seed: of all sampling.
        resample_rounds: how many other tasks may replace that of a group without a signal.
        failed_members: ``shrink`` leaves failed episodes out, and the group if fewer than ``smallest_group`` remain;
            ``drop`` leaves the whole group out; ``resample`` plays other episodes in their place, then shrinks.
        member_rounds: how many times ``resample`` does so.
        smallest_group: fewest episodes that the algorithm can compare.
        silent: whether a group carries no learning signal.
        trees: whether the episodes are the paths of a turn tree. Paths share decisions, so ``resample`` plays the whole
            tree again.
        further: the further episodes of each group.

    Raises:
        ConfigurationError: a value out of range.
    """

    tasks: TaskStream
    groups: int
    group_sizes: Mapping[str, int]
    seed: int
    resample_rounds: int = 0
    failed_members: FailedMembers = "shrink"
    member_rounds: int = 2
    smallest_group: int = 1
    silent: Callable[[Sequence[Episode]], bool] = equal_returns
    trees: bool = False
    further: FurtherEpisodes | None = None

    def __post_init__(self) -> None:
        at_least(0, "data.", resample_rounds=self.resample_rounds)
        one_of(get_args(FailedMembers), "data.", failed_members=self.failed_members)
        at_least(1, "data.", member_rounds=self.member_rounds)

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


@dataclass
class GroupDraft:
    """One group of an iteration while it is played: again with another task as long as it carries no signal.

    Args:
        plan: which episodes there are, with the rules for those that fail.
        iteration: of the group.
        group: its number in the iteration.

    Attributes:
        episodes: those of the current task.
        replaced: others that were played.
        branches: further episodes, those of replaced tasks included.
        due: whether :meth:`specs` are to be played.
        left_out: whether the group does not train: for a failed episode, or because too few remain.
    """

    plan: GroupPlan
    iteration: int
    group: int
    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    branches: list[Episode] = field(default_factory=list)
    due: bool = True
    left_out: bool = False
    _attempt: int = 0
    _resampled: int = 0
    _round: int = 0
    _failed: list[int] = field(default_factory=list)
    _further: Sequence[EpisodeSpec] = ()
    _further_rounds: int = 0

    def specs(self) -> list[EpisodeSpec]:
        """Return the episodes that are due; of a turn tree, its root."""
        if self._further:
            return [*self._further]
        specs = self.plan.specs(self.iteration, self.group, self._attempt)
        if self.plan.trees:
            specs = [self.plan.root(self.iteration, self.group, self._attempt)]
        elif self._round:
            specs = [specs[place] for place in self._failed]
        if not self._round:
            return specs
        # Each round has its own seed.
        return [
            replace(spec, id=f"{spec.id}+{self._round}", seed=derive_seed("another", spec.seed, self._round))
            for spec in specs
        ]

    def take(self, episodes: Sequence[Episode]) -> None:
        """Add the episodes that were due, and decide whether further episodes or another task come next.

        Raises:
            EnvironmentContractError: a further episode differs from its origin before it branches.
        """
        if self._further:
            self._further_rounds += 1
            self.branches += episodes
        else:
            if self._round and not self.plan.trees:
                for place, episode in zip(self._failed, episodes, strict=True):
                    self.replaced.append(self.episodes[place])
                    self.episodes[place] = episode
            else:
                self.replaced += self.episodes
                self.episodes = list(episodes)
            self._failed = [place for place, episode in enumerate(self.episodes) if episode.failed]
            if self._failed and self.plan.failed_members == "resample" and self._round < self.plan.member_rounds:
                self._round += 1
                self._resampled += len(self._failed)
                return
            self._round = self._further_rounds = 0
            few = len(self.episodes) - len(self._failed) < self.plan.smallest_group
            self.left_out = few or (self.plan.failed_members == "drop" and bool(self._failed))
        group = [*self.episodes, *(branch for branch in self.branches if branch.group == self.episodes[0].group)]
        played = {episode.id: episode for episode in group}
        for branch in group[len(self.episodes) :]:
            if branch.origin is not None and not branch.failed:
                check_origin(played[branch.origin.episode], branch)
        further = None if self.left_out else self.plan.further
        self._further = further.due(group, self._further_rounds) if further is not None else ()
        if self._further:
            return
        self._attempt += 1
        again = self._attempt <= self.plan.resample_rounds
        self.due = again and (self.left_out or self.plan.silent(group))

    def collected(self, greedy: Sequence[Episode] = ()) -> Collected:
        """Return the complete group."""
        counts = {
            "resampled_groups": float(self._attempt - 1),
            "resampled_members": float(self._resampled),
            "dropped_groups": float(self.left_out),
        }
        kept, unused = ([], self.episodes) if self.left_out else (self.episodes, [])
        replaced = [*excluded(self.replaced, "replaced"), *excluded(unused, "left_out")]
        return Collected([*kept], replaced, [*greedy], self.branches, counts)


@dataclass
class Collected:
    """The episodes of one group or of several.

    Args:
        episodes: the ordinary ones that train, group after group.
        replaced: others that were played.
        greedy: one greedy episode of the task of each group, where the algorithm compares with them.
        branches: further episodes of the groups, and of replaced ones.
        counts: ``resampled_groups``, ``resampled_members`` and ``dropped_groups``.
        metrics: (sum, count) of means to be logged, by name.
        seconds: in which the episodes were played; None is the time that collecting them took.
        earlier_tokens: tokens of earlier collections that were sampled in these seconds.
    """

    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    greedy: list[Episode] = field(default_factory=list)
    branches: list[Episode] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
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
        """All episodes, in the order in which files hold them, with the reason for which one is not trained on."""
        groups = {episode.group for episode in self.episodes}
        branches = [
            branch if branch.group in groups else replace(branch, excluded="replaced") for branch in self.branches
        ]
        return [*self.episodes, *self.replaced, *excluded(self.greedy, "greedy"), *branches]

    @property
    def training(self) -> list[Episode]:
        """The episodes that train: the ordinary ones, then the further ones of their groups."""
        groups = {episode.group for episode in self.episodes}
        return [*self.episodes, *(branch for branch in self.branches if branch.group in groups)]

    def put_training(self, episodes: Sequence[Episode]) -> None:
        """Put other records in the place of :attr:`training`, in its order."""
        own = {episode.id: episode for episode in episodes}
        self.episodes = [own[episode.id] for episode in self.episodes]
        self.branches = [own.get(episode.id, episode) for episode in self.branches]

    def to_plain(self) -> list[Any]:
        """Return the groups as plain values for a checkpoint."""
        parts = (self.episodes, self.replaced, self.greedy, self.branches)
        return [self.counts, *([episode.to_json() for episode in part] for part in parts)]

    @classmethod
    def from_plain(cls, counts: Mapping[str, float], *parts: Sequence[str]) -> Collected:
        """Restore what :meth:`to_plain` returned."""
        episodes, replaced, greedy, branches = ([Episode.from_json(text) for text in part] for part in parts)
        return cls(episodes, replaced, greedy, branches, dict(counts))


def excluded(episodes: Sequence[Episode], reason: str) -> list[Episode]:
    """Return the episodes with the reason for which they are not trained on."""
    return [replace(episode, excluded=reason) for episode in episodes]


class PlaysSpecs(Protocol):
    """A player of episodes or of turn trees."""

    async def play(self, specs: Sequence[EpisodeSpec]) -> Sequence[Any]:
        """Return an episode for each spec, or the paths of its turn tree."""


@dataclass(eq=False, repr=False)  # some fields come later
class Collector:
    """Plays the episodes that are due in groups, in lockstep: all decisions of a wave in one engine call.

    Args:
        players: of the run.
        plan: which episodes there are.
        sampling: how turns are sampled.

    Attributes:
        playing: the players of episodes, once they are made.
        training: plays the episodes that train.
        due: plays the due specs of a group: ``training`` or ``trees``.
        greedy: plays the greedy episode of each group, where the algorithm compares with it.
        trees: plays turn trees, where the algorithm trains on them.
    """

    players: Players
    plan: GroupPlan
    sampling: Sampling
    playing: Sequence[EpisodePlayer] = field(default=(), init=False)
    training: EpisodePlayer = field(init=False)
    due: PlaysSpecs = field(init=False)
    greedy: PlaysSpecs | None = field(init=False)
    trees: TreePlayer | None = field(init=False)

    def make_players(self, **options: Any) -> None:
        """Make the players, with options of :meth:`Players.player`."""
        learner, sampling = self.players.learner, self.sampling
        self.training, self.greedy = self.players.player(sampling, crossed=True, **options), None
        self.playing = [self.training]
        if learner.uses_greedy_baseline:
            greedy = self.players.player(sampling.for_all(temperature=0.0, top_p=1.0, top_k=0), **options)
            self.greedy, self.playing = greedy, [self.training, greedy]
        tree = learner.tree
        self.trees = None if tree is None else TreePlayer(self.training, tree.branching, self.plan.group_sizes)
        self.due = self.trees or self.training

    async def play_due(self, drafts: Sequence[GroupDraft]) -> None:
        """Play the episodes that are due in these groups once, and add them."""
        due = [draft.specs() for draft in drafts]
        played = iter(await self.due.play([*chain.from_iterable(due)]))
        for draft, specs in zip(drafts, due, strict=True):
            draft.take(next(played) if self.trees else [next(played) for _ in specs])

    async def play_greedy(self, iteration: int, groups: Sequence[int]) -> list[Episode]:
        """Return the greedy episode of each group; none where the algorithm does not use them."""
        if self.greedy is None:
            return []
        return list(await self.greedy.play([self.plan.greedy(iteration, group) for group in groups]))

    def state(self) -> dict[str, Any] | None:
        """Return the groups that are played ahead, for a checkpoint; None without any."""
        return None

    def close(self) -> None:
        """Stop all episodes; may be called twice."""


@dataclass(eq=False, repr=False)
class SyncCollector(Collector):
    """Plays all groups of an iteration side by side, with the current weights.

    Args:
        players, plan, sampling: see :class:`Collector`.
        rounds: see :class:`~mrlm_pl.rollout.rounds.RoundOptions`; None plays in lockstep.
    """

    rounds: RoundOptions | None = None
    _in_rounds: bool = field(default=False, init=False)

    def collect(self, iteration: int, last: int, groups: Sequence[int]) -> Collected:
        """Return the episodes of these groups of an iteration; every rank calls it, with its own groups.

        Raises:
            SIGTERMException: on all ranks, when SIGTERM has interrupted one of them.
        """
        trainer = self.players.learner.trainer
        if not self.playing:
            self.make_players()
        collected, stopped = Collected(), False
        if self.greedy is not None:
            try:
                collected.greedy = self._play(partial(self.play_greedy, iteration, groups))
            except SIGTERMException:
                stopped = True
        drafts = [GroupDraft(self.plan, iteration, group) for group in groups]
        while True:
            due = [draft for draft in drafts if draft.due]
            left = sum_over_ranks(trainer, torch.tensor(math.inf if stopped else float(len(due))))
            if math.isinf(left):
                raise SIGTERMException
            if not left:
                break  # as long as one rank plays, all gather the weights
            try:
                self._play(partial(self.play_due, due))
            except SIGTERMException:
                stopped = True
        for draft in drafts:
            collected.add(draft.collected())
        return collected

    def _play(self, play: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Play a coroutine with the current weights; SIGTERM may interrupt it.

        It interrupts the playing alone: all ranks gather the weights together, so that none may leave in between.
        """

        with self.players.published(), leaving_at_sigterm(self.players.learner.trainer):
            if self.rounds is not None and not self._in_rounds:  # a loaded engine knows whether it takes pieces
                self._play_in_rounds(self.rounds)
            return self.training.run_blocking(play)

    def _play_in_rounds(self, options: RoundOptions) -> None:
        rounds = Rounds(self.players.engine, options)
        for player in dict.fromkeys(self.playing):
            player.engine, player.caller = rounds, CallerInRounds(player.caller, rounds)
        self.due = PlayerInRounds(self.due, rounds)
        self.greedy = self.greedy and PlayerInRounds(self.greedy, rounds)
        self._in_rounds = True
