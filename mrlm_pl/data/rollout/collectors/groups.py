"""The groups of an iteration: the episodes that each one plays, and those that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mrlm_pl.data.rollout.tasks.stream import TaskStream
from mrlm_pl.episode import Episode
from mrlm_pl.learner.credit.groups import equal_returns
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import at_least, one_of

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

    def __post_init__(self) -> None:
        at_least(0, "data.", resample_rounds=self.resample_rounds)
        one_of(get_args(FailedMembers), "data.", failed_members=self.failed_members)
        at_least(1, "data.", member_rounds=self.member_rounds)

    def of_rank(self, rank: int, ranks: int) -> range:
        """Return the numbers of a rank's groups in an iteration."""
        # Blocks: with strides, environments that take turns in the stream would each land on one rank.
        return range(rank * self.groups // ranks, (rank + 1) * self.groups // ranks)

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
            "data.environment": repr(dict(zip(self.tasks.sources, self.tasks.shares, strict=True))),
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
        due: whether :meth:`specs` are to be played.
    """

    plan: GroupPlan
    iteration: int
    group: int
    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    due: bool = True
    _attempt: int = 0
    _resampled: int = 0
    _round: int = 0
    _failed: list[int] = field(default_factory=list)

    def specs(self) -> list[EpisodeSpec]:
        """Return the episodes that are due; of a turn tree, its root."""
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
        """Add the episodes that were due."""
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
        self._round = 0
        self._attempt += 1
        again = self._attempt <= self.plan.resample_rounds
        self.due = again and (self.left_out or self.plan.silent(self.episodes))

    @property
    def left_out(self) -> bool:
        """Return True if the group is left out: for a failed episode, or because too few remain."""
        if self.plan.failed_members == "drop" and self._failed:
            return True
        return len(self.episodes) - len(self._failed) < self.plan.smallest_group

    def collected(self, greedy: Sequence[Episode] = ()) -> Collected:
        """Return the complete group."""
        counts = {
            "resampled_groups": float(self._attempt - 1),
            "resampled_members": float(self._resampled),
            "dropped_groups": float(self.left_out),
        }
        kept, unused = ([], self.episodes) if self.left_out else (self.episodes, [])
        return Collected([*kept], [*self.replaced, *unused], [*greedy], counts)


@dataclass
class Collected:
    """The episodes of one group or of several.

    Args:
        episodes: those that train, group after group.
        replaced: others that were played.
        greedy: one greedy episode of the task of each group, where the algorithm compares with them.
        counts: ``resampled_groups``, ``resampled_members`` and ``dropped_groups``.
        metrics: (sum, count) of means to be logged, by name.
        seconds: in which the episodes were played; None is the time that collecting them took.
        earlier_tokens: tokens of earlier collections that were sampled in these seconds.
    """

    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    greedy: list[Episode] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float | None = None
    earlier_tokens: float = 0.0

    def add(self, other: Collected) -> None:
        """Append the episodes of another part of the collection."""
        self.episodes += other.episodes
        self.replaced += other.replaced
        self.greedy += other.greedy
        self.counts = {
            name: self.counts.get(name, 0.0) + other.counts.get(name, 0.0) for name in {**self.counts, **other.counts}
        }

    @property
    def played(self) -> list[Episode]:
        """All episodes, in the order in which files hold them."""
        return [*self.episodes, *self.replaced, *self.greedy]

    def to_plain(self) -> list[Any]:
        """Return the groups as plain values for a checkpoint."""
        parts = (self.episodes, self.replaced, self.greedy)
        return [self.counts, *([episode.to_json() for episode in part] for part in parts)]

    @classmethod
    def from_plain(cls, counts: Mapping[str, float], *parts: Sequence[str]) -> Collected:
        """Restore what :meth:`to_plain` returned."""
        episodes, replaced, greedy = ([Episode.from_json(text) for text in part] for part in parts)
        return cls(episodes, replaced, greedy, dict(counts))
