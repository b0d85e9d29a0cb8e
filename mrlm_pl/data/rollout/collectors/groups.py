"""Which episodes an iteration plays, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mrlm_pl.data.rollout.tasks.stream import TaskStream
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.seeding import derive_seed

FailedMembers = Literal["shrink", "drop", "resample"]
_FAILED_MEMBERS = ("shrink", "drop", "resample")


@dataclass(frozen=True)
class GroupRules:
    """When the episodes of a group are complete, and when they are left out.

    Args:
        silent: whether episodes that are compared teach nothing.
        smallest_group: fewest episodes that can be compared.
        failed_members: what becomes of a group some of whose episodes failed for good. ``shrink`` leaves these out, and
            the group if fewer than ``smallest_group`` are left; ``drop`` leaves the whole group out; ``resample`` plays
            other episodes of the task in their place, and shrinks what still has failed ones then.
        member_rounds: how many times ``resample`` does so.
        trees: whether the episodes are the paths of a turn tree. Paths share decisions, so ``resample`` plays the whole
            tree again.

    Raises:
        ConfigurationError: an unknown word, or a bound below 1.
    """

    silent: Callable[[Sequence[Episode]], bool]
    smallest_group: int = 1
    failed_members: FailedMembers = "shrink"
    member_rounds: int = 2
    trees: bool = False

    def __post_init__(self) -> None:
        check_failure_rule(self.failed_members, self.member_rounds)

    def unusable(self, episodes: Sequence[Episode]) -> bool:
        """Whether these episodes of a group are left out."""
        failed = sum(episode.failed for episode in episodes)
        if self.failed_members == "drop" and failed:
            return True
        return len(episodes) - failed < self.smallest_group


def check_failure_rule(failed_members: str, member_rounds: int) -> None:
    """Nothing when these can be meant.

    Raises:
        ConfigurationError: an unknown word, or a bound below 1.
    """
    if failed_members not in _FAILED_MEMBERS:
        raise ConfigurationError(f"data.failed_members is {failed_members!r}; choose from {', '.join(_FAILED_MEMBERS)}")
    if member_rounds < 1:
        raise ConfigurationError(
            f"data.member_rounds is {member_rounds}; it must be 1 or above (or set data.failed_members to shrink)"
        )


@dataclass(frozen=True)
class GroupPlan:
    """The episodes of every group of every iteration, as a function of the position alone.

    Args:
        tasks: where tasks are drawn.
        groups: in an iteration, over all ranks.
        group_sizes: episodes of each, by environment.
        attempts: tasks that each group has, used or not: the first and those that may replace it.
        seed: of all sampling.
        rules: what becomes of what was played.
    """

    tasks: TaskStream
    groups: int
    group_sizes: Mapping[str, int]
    attempts: int
    seed: int
    rules: GroupRules

    def specs(self, iteration: int, group: int, attempt: int = 0) -> list[EpisodeSpec]:
        """The episodes of a group at an attempt."""
        task = self.tasks.attempt(iteration * self.groups + group, attempt, self.attempts)
        name = f"{iteration}-{group}" + (f".{attempt}" if attempt else "")
        return [
            EpisodeSpec(
                id=f"{name}-{member}",
                task=task,
                group=name,
                seed=derive_seed("episode", self.seed, *_key(iteration, group, attempt), member),
                iteration=iteration,
            )
            for member in range(self.group_sizes[task.environment])
        ]

    def root(self, iteration: int, group: int, attempt: int = 0) -> EpisodeSpec:
        """The root of a group's turn tree."""
        first = self.specs(iteration, group, attempt)[0]
        return replace(first, id=first.group)

    def another(self, spec: EpisodeSpec, number: int) -> EpisodeSpec:
        """An episode of the same group with a seed of its own, the ``number``-th in the place of one that failed."""
        return replace(spec, id=f"{spec.id}+{number}", seed=derive_seed("another", spec.seed, number))


def _key(iteration: int, group: int, attempt: int) -> tuple[int, ...]:
    return (iteration, group, attempt) if attempt else (iteration, group)


@dataclass
class GroupDraft:
    """One group of an iteration, played again with another task as long as its episodes teach nothing.

    Whoever collects plays what is due (:meth:`specs`, or :meth:`root` of a turn tree), hands it to :meth:`take` and
    goes on while :attr:`due`; then :meth:`kept` and :meth:`others` are what was played.

    Args:
        plan: which episodes there are, with the rules for those that fail.
        iteration: of the group.
        group: its number in the iteration.
        episodes: those of the current task.
        replaced: others that were played.
        due: whether episodes are to be played.
        attempt: how many tasks were played to the end.
        resampled: how many failed episodes were played again.
    """

    plan: GroupPlan
    iteration: int
    group: int
    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    due: bool = True
    attempt: int = 0
    resampled: int = 0
    _round: int = 0
    _failed: list[int] = field(default_factory=list)

    def specs(self) -> list[EpisodeSpec]:
        """The separate episodes that are due."""
        specs = self.plan.specs(self.iteration, self.group, self.attempt)
        if not self._round:
            return specs
        return [self.plan.another(specs[place], self._round) for place in self._failed]

    def root(self) -> EpisodeSpec:
        """The root of the turn tree that is due."""
        root = self.plan.root(self.iteration, self.group, self.attempt)
        return self.plan.another(root, self._round) if self._round else root

    def take(self, episodes: Sequence[Episode]) -> None:
        """Note what was played of what was due."""
        rules = self.plan.rules
        if self._round and not rules.trees:
            for place, episode in zip(self._failed, episodes, strict=True):
                self.replaced.append(self.episodes[place])
                self.episodes[place] = episode
        else:
            self.replaced += self.episodes
            self.episodes = list(episodes)
        self._failed = [place for place, episode in enumerate(self.episodes) if episode.failed]
        if self._failed and rules.failed_members == "resample" and self._round < rules.member_rounds:
            self._round += 1
            self.resampled += len(self._failed)
            return
        self._round = 0
        self.attempt += 1
        self.due = self.attempt < self.plan.attempts and (self.left_out or rules.silent(self.episodes))

    @property
    def left_out(self) -> bool:
        """Whether too few of the episodes can be used."""
        return self.plan.rules.unusable(self.episodes)

    def kept(self) -> list[Episode]:
        """The episodes that are learnt from."""
        return [] if self.left_out else self.episodes

    def others(self) -> list[Episode]:
        """All others that were played."""
        return [*self.replaced, *self.episodes] if self.left_out else self.replaced

    def counts(self) -> dict[str, float]:
        """What became of the group, as numbers that add up over groups, by the name they are logged under."""
        return {
            "resampled_groups": float(self.attempt - 1),
            "resampled_members": float(self.resampled),
            "dropped_groups": float(self.left_out),
        }
